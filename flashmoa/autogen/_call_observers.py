"""Find who is notified of a client's calls: its linked teams, or its own listener if no team is.

A *listener* is a function, usually the user's, that receives events. A *reporter*
(:class:`CallReporter`) turns what happens to one call into events for one listener. An *observer*
(:class:`CallObserver`) is given the text and the end of one call as they arrive: a linked team's
streams the text into links, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakValueDictionary

from autogen_core import AgentId
from autogen_core._message_handler_context import MessageHandlerContext

from flashmoa._concurrency import all_of
from flashmoa.linking.calls import CallObserver, CallRequest, LinkedTeam
from flashmoa.observe import Listener, ignore
from flashmoa.observe.calls import CallReporter

logger = logging.getLogger(__name__)


class CallObservers:
    """Finds the observers of each call of one client.

    Args:
        engine: the URL of the client's engine.
        model: the model name in its requests.
        listener: receives the events of calls that no linked team observes, and of teams that are
            linked by ``auto_link``.
        auto_link: a function that links the team on whose behalf the client is being called; its
            argument is the listener. ``None``: teams are not linked automatically.
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
        # Weak: a client may live longer than the teams that use it and must not keep them in
        # memory. A team holds its LinkedTeam itself. By id: a WeakSet cannot be read while another
        # thread adds to it.
        self._by_id: WeakValueDictionary[int, LinkedTeam] = WeakValueDictionary()

    @property
    def _teams(self) -> list[LinkedTeam]:
        return [team for each in self._by_id.valuerefs() if (team := each()) is not None]

    def add(self, team: LinkedTeam) -> None:
        self._by_id[id(team)] = team

    def remove(self, team: LinkedTeam) -> None:
        self._by_id.pop(id(team), None)

    def begin(
        self, held: str | None, stream_id: str | None = None, *, late: bool = False
    ) -> list[CallObserver]:
        """Return the observers of a call whose request is about to be sent.

        Args:
            held: see :class:`CallRequest`.
            stream_id, late: what to report in ``CallStarted`` if no linked team observes the call.
        """
        observers = self._observe_or_link(CallRequest(self._engine, self._model, held))
        if observers or self._listener is ignore:
            return observers
        reporter = self.make_reporter(caller_name())
        reporter.started(stream_id, late=late)
        return [CallObserver(reporter)]

    def make_reporter(self, agent: str) -> CallReporter:
        """Return a reporter of one call to the client's listener."""
        return CallReporter(self._listener, agent=agent, engine=self._engine, model=self._model)

    async def close(self) -> None:
        """End the links of every team."""
        await all_of([team.close for team in self._teams])

    def _observe_or_link(self, request: CallRequest) -> list[CallObserver]:
        """Return the linked teams' observers of a request; link the caller's team if none is."""
        agent = calling_agent()
        if agent is None:
            return []
        observers = self._observe(request)
        if not observers and self._auto_link is not None:
            try:
                self._auto_link(self._listener)
            except Exception:
                # Whatever is wrong with a link, the agent's call must be made.
                text = "The team of %s runs unlinked because of the error below"
                logger.exception(text, agent.type)
            observers = self._observe(request)
        return observers

    def _observe(self, request: CallRequest) -> list[CallObserver]:
        observers = [team.observe(request) for team in self._teams]
        return [observer for observer in observers if observer is not None]


def calling_agent() -> AgentId | None:
    """Return the AutoGen id of the agent on whose behalf this code runs, if there is one."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None


def caller_name() -> str:
    """Return the caller's name for events.

    That is the agent's name, with the ``_<team id>`` suffix that AutoGen adds removed, or
    ``"client"`` if no agent calls.
    """
    agent = calling_agent()
    return agent.type.removesuffix(f"_{agent.key}") if agent is not None else "client"
