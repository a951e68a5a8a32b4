"""Who is told of one client's calls: linked teams, or else its listener."""

from __future__ import annotations

import logging
from weakref import WeakSet

from autogen_core import AgentId
from autogen_core._message_handler_context import MessageHandlerContext

from flashmoa._concurrency import all_of
from flashmoa.autogen._calls import CallObserver, CallWatcher, ReportedCall, Request
from flashmoa.observe import Listener, ignore
from flashmoa.observe.calls import CallReporter

logger = logging.getLogger(__name__)


class Watchers:
    """Of one client.

    Args:
        engine: its engine's URL. model: as its requests name it.
        listener: is told of calls that no linked team tells of, and of teams linked by themselves.
        auto_link: whether teams are linked at their agents' first call.
    """

    def __init__(self, engine: str, model: str, listener: Listener, *, auto_link: bool) -> None:
        self._engine = engine
        self._model = model
        self._listener = listener
        self._auto_link = auto_link
        # A linked team keeps its link; a client must not keep the team.
        self._watchers: WeakSet[CallWatcher] = WeakSet()

    def add(self, watcher: CallWatcher) -> None:
        self._watchers.add(watcher)

    def remove(self, watcher: CallWatcher) -> None:
        self._watchers.discard(watcher)

    def begin(
        self, held: str | None, stream_id: str | None = None, *, late: bool = False
    ) -> list[CallObserver]:
        """A call goes out: who is told of it, and tells of it once.

        Args:
            held: see :class:`Request`.
            stream_id, late: of a call with a prompt stream of its own; see ``CallStarted``.
        """
        observers = self._teams(held)
        if not observers and self._listener is not ignore:
            report = self.reporter(caller_name())
            report.started(stream_id, late=late)
            observers.append(ReportedCall(report))
        return observers

    def reporter(self, agent: str) -> CallReporter:
        """Tells the listener of one call."""
        return CallReporter(self._listener, agent=agent, engine=self._engine, model=self._model)

    async def close(self) -> None:
        await all_of([watcher.close for watcher in list(self._watchers)])

    def _teams(self, held: str | None) -> list[CallObserver]:
        agent = calling_agent()
        if agent is None:
            return []
        request = Request(self._engine, self._model, held)
        observers = self._told(agent, request)
        if not observers and self._auto_link:
            from flashmoa.autogen._team import link_caller  # It imports the client.

            try:
                link_caller(self._listener)
            except Exception:
                # Whatever is wrong with a link, the agent's call goes out.
                logger.exception("The team of %s runs unlinked", agent.type)
            observers = self._told(agent, request)
        return observers

    def _told(self, agent: AgentId, request: Request) -> list[CallObserver]:
        begun = (watcher.begin(agent.type, agent.key, request) for watcher in list(self._watchers))
        return [observer for observer in begun if observer is not None]


def calling_agent() -> AgentId | None:
    """Who is calling, if it is an agent."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None


def caller_name() -> str:
    """Who is calling, for events: an agent of a team without the team's id."""
    agent = calling_agent()
    return agent.type.removesuffix(f"_{agent.key}") if agent is not None else "client"
