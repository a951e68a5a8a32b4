"""Who hears of one client's calls: linked teams, or else its listener."""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakSet

from autogen_core import AgentId
from autogen_core._message_handler_context import MessageHandlerContext

from flashmoa._concurrency import all_of
from flashmoa.linking.observed_call import CallObserver, CallRequest, LinkedTeam, ReportedCall
from flashmoa.observe import Listener, ignore
from flashmoa.observe.calls import CallReporter

logger = logging.getLogger(__name__)


class CallObservers:
    """Finds the observers of each call of one client.

    Args:
        engine: its engine's URL.
        model: as its requests name it.
        listener: receives events of calls that no linked team reports, and of teams that are
            linked by ``auto_link``.
        auto_link: links the team on whose behalf the client is being called, if given.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        listener: Listener,
        auto_link: Callable[[Listener], None] | None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._listener = listener
        self._auto_link = auto_link
        # A linked team keeps its link; a client must not keep the team.
        self._teams: WeakSet[LinkedTeam] = WeakSet()

    def add(self, team: LinkedTeam) -> None:
        self._teams.add(team)

    def remove(self, team: LinkedTeam) -> None:
        self._teams.discard(team)

    def begin(
        self, held: str | None, stream_id: str | None = None, *, late: bool = False
    ) -> list[CallObserver]:
        """Return the observers of a call that goes out; one of them reports it.

        Args:
            held: see :class:`CallRequest`.
            stream_id, late: of a call with a prompt stream of its own; see ``CallStarted``.
        """
        observers = self._of_teams(CallRequest(self._engine, self._model, held))
        if not observers and self._listener is not ignore:
            report = self.reporter(caller_name())
            report.started(stream_id, late=late)
            observers.append(ReportedCall(report))
        return observers

    def reporter(self, agent: str) -> CallReporter:
        """Return what reports one call to the listener."""
        return CallReporter(self._listener, agent=agent, engine=self._engine, model=self._model)

    async def close(self) -> None:
        """End the links of every team."""
        await all_of([team.close for team in list(self._teams)])

    def _of_teams(self, request: CallRequest) -> list[CallObserver]:
        agent = calling_agent()
        if agent is None:
            return []
        observers = self._observe(request)
        if not observers and self._auto_link is not None:
            try:
                self._auto_link(self._listener)
            except Exception:
                # Whatever is wrong with a link, the agent's call goes out.
                logger.exception("The team of %s runs unlinked", agent.type)
            observers = self._observe(request)
        return observers

    def _observe(self, request: CallRequest) -> list[CallObserver]:
        begun = (team.observe(request) for team in list(self._teams))
        return [observer for observer in begun if observer is not None]


def calling_agent() -> AgentId | None:
    """Return the id of the agent that is calling, if it is one."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None


def caller_name() -> str:
    """Return the caller's name for events: an agent of a team without the team's id."""
    agent = calling_agent()
    return agent.type.removesuffix(f"_{agent.key}") if agent is not None else "client"
