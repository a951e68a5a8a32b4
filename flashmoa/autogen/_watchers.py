"""The linked teams that are told of one client's calls."""

from __future__ import annotations

import logging
from weakref import WeakSet

from autogen_core import AgentId
from autogen_core._message_handler_context import MessageHandlerContext

from flashmoa.autogen._calls import CallObserver, CallWatcher
from flashmoa.observe import Listener

logger = logging.getLogger(__name__)


class Watchers:
    """Of one client.

    Args:
        engine: its engine's URL.
        auto_link: told of teams that are linked at their agents' first call; ``None`` where
            teams are not to be linked by themselves.
    """

    def __init__(self, engine: str, auto_link: Listener | None) -> None:
        self._engine = engine
        self._auto_link = auto_link
        # A linked team keeps its link; a client must not keep the team.
        self._watchers: WeakSet[CallWatcher] = WeakSet()

    def add(self, watcher: CallWatcher) -> None:
        self._watchers.add(watcher)

    def remove(self, watcher: CallWatcher) -> None:
        self._watchers.discard(watcher)

    def begin(self, held: str | None) -> list[CallObserver]:
        """A call goes out: what teams do about it. ``held``: see :class:`CallWatcher`."""
        agent = calling_agent()
        if agent is None:
            return []
        observers = self._told(agent, held)
        if not observers and self._auto_link is not None:
            from flashmoa.autogen._team import link_caller  # It imports the client.

            try:
                link_caller(self._auto_link)
            except Exception:
                # Whatever is wrong with a link, the agent's call goes out.
                logger.exception("The team of %s runs unlinked", agent.type)
            observers = self._told(agent, held)
        return observers

    async def close(self) -> None:
        for watcher in list(self._watchers):
            await watcher.close()

    def _told(self, agent: AgentId, held: str | None) -> list[CallObserver]:
        begun = (
            watcher.begin(agent.type, agent.key, self._engine, held)
            for watcher in list(self._watchers)
        )
        return [observer for observer in begun if observer is not None]


def calling_agent() -> AgentId | None:
    """Who is calling, if it is an agent."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None
