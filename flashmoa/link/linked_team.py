"""Link a team or workflow (:class:`LinkedTeam`), and let its agents' clients report their requests
to it (:class:`LinkedTeams`)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

import anyio

from flashmoa._concurrency import all_of
from flashmoa.link.calls import CallObserver, CallRequest
from flashmoa.link.options import LinkSettings
from flashmoa.link.planner import LinkPlanner
from flashmoa.observe import Listener
from flashmoa.observe.report import Report, Reported
from flashmoa.observe.trace import end_trace

logger = logging.getLogger(__name__)

Planner = TypeVar("Planner", bound=LinkPlanner)

# The attribute of a team with its link, so that both live equally long.
_LINK_ATTRIBUTE = "_flashmoa_link"


class LinkedTeam(Reported, ABC, Generic[Planner]):
    """Links one team or workflow, until it or the clients of its agents are closed.

    Print it, or show it in a notebook, to see what the links have gained so far. Close it, or use
    it as a context manager.

    Args:
        owner: the object that keeps the link; its earlier link is ended.
        observed: the linked teams of its agents' clients; the link is added to them.
        planner: plans its links.
        report: receives its events.
        listener: receives the events from the report, and its trace ends with the link; ``None``
            for a team within a linked team, which shares that team's report.
    """

    def __init__(
        self,
        owner: Any,
        observed: Iterable[LinkedTeams],
        planner: Planner,
        report: Report,
        listener: Listener | None,
    ) -> None:
        self._observed = list(observed)
        self._listener = listener
        self._planner = planner
        self.report = report
        previous = link_of(owner)
        if previous is not None:
            previous._retire()
        setattr(owner, _LINK_ATTRIBUTE, self)
        for teams in self._observed:
            teams.add(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every link and wait until the engines have their KV back; the team can still run."""
        self._retire()
        await self._planner.host.close()

    def observe(self, caller: Any, request: CallRequest) -> CallObserver | None:
        """Return the observer of a request; ``None`` if it is not made for an agent of the team.

        Args:
            caller: the framework's object for the caller.
        """
        name = self._find_name(caller)
        if name is None:
            return None
        try:
            return self._begin(name, request)
        except Exception:
            # Whatever is wrong with a link, the agent's request must be sent.
            logger.exception("%s runs unlinked because of the error below", name)
            return None

    @abstractmethod
    def _find_name(self, caller: Any) -> str | None:
        """Return the name of the team's agent that is calling, if it is one."""

    @abstractmethod
    def _begin(self, name: str, request: CallRequest) -> CallObserver | None:
        """Tell the planner of a request that is about to be sent. Return its observer."""

    def _retire(self) -> None:
        for teams in self._observed:
            teams.discard(self)
        self._planner.end_all("closed")
        if self._listener is not None:
            end_trace(self._listener)


class LinkedTeams:
    """The linked teams that observe a client's calls.

    It references them weakly: a client may live longer than its teams, and must not keep them in
    memory. It is no WeakSet, which could not be read while another thread adds a team.
    """

    def __init__(self) -> None:
        self._teams: WeakValueDictionary[int, LinkedTeam[Any]] = WeakValueDictionary()

    def __iter__(self) -> Iterator[LinkedTeam[Any]]:
        return iter([team for each in self._teams.valuerefs() if (team := each()) is not None])

    def __len__(self) -> int:
        return len(self._teams)

    def add(self, team: LinkedTeam[Any]) -> None:
        self._teams[id(team)] = team

    def discard(self, team: LinkedTeam[Any]) -> None:
        self._teams.pop(id(team), None)

    def observe(self, caller: Any, request: CallRequest) -> list[CallObserver]:
        """Return the observers of a request; see :meth:`LinkedTeam.observe`."""
        observers = [team.observe(caller, request) for team in self]
        return [observer for observer in observers if observer is not None]

    async def close(self, *connections: Callable[[], Awaitable[None]]) -> None:
        """Close every link of the teams, all at once, then the client's connections."""
        try:
            await all_of([team.close for team in self])
        finally:
            with anyio.CancelScope(shield=True):
                await all_of(connections)


def link_of(owner: Any) -> LinkedTeam[Any] | None:
    return getattr(owner, _LINK_ATTRIBUTE, None)


def listen_for(owner: Any, settings: LinkSettings) -> Listener:
    """Return the listener of a new link of ``owner``, whose trace replaces the earlier link's."""
    previous = link_of(owner)
    return settings.listen(previous._listener if previous is not None else None)
