"""Keep a link to each agent that may call next, while other agents write (:class:`LinkPlanner`).

:meth:`LinkPlanner.plan` brings the links up to date in the background of calls. ``upcoming``
returns the turns that may come next, ``expect`` returns the request of a turn, and
:class:`~flashmoa.link.links.Links` keeps, extends, opens and ends the links. A
:class:`LinkedCall` observes one call, and gives its text to the links that wait for it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio

from flashmoa._concurrency import SingleFlight, TaskHost
from flashmoa.engine import EngineClient
from flashmoa.link import reasons
from flashmoa.link.after_tools import RequestAfterTools, RunningTools
from flashmoa.link.calls import CallObserver, CallRequest, CallResult, OutputLengths
from flashmoa.link.expected import ExpectedRequest, Turn
from flashmoa.link.hearing import CallChannel
from flashmoa.link.link import Link
from flashmoa.link.links import IsCurrent, Links
from flashmoa.link.options import LinkSettings, Session
from flashmoa.link.prompt_feed import level_once
from flashmoa.link.streamed_text import Text
from flashmoa.observe import LinkWaits, Listener
from flashmoa.observe.calls import CallReporter
from flashmoa.observe.events import FIRST

logger = logging.getLogger(__name__)

# A message that is published reaches every agent within a few rounds of the event loop.
DELIVERY_SECONDS = 0.002
END_POLL_SECONDS = 0.2

Expect = Callable[[Turn], Awaitable[ExpectedRequest | None]]


class LinkPlanner(ABC):
    """Plans a team's links.

    Each agent framework has a subclass, which knows the agents that may call next
    (:meth:`upcoming`) and their requests (:meth:`expect`). It reports each call by :meth:`begin`.

    Args:
        listener: receives the events.
        settings: the options for links.
        kv_share: the share, from 0 to 1, of an engine's KV pool for links to uncertain requests.

    Attributes:
        streams: whether texts are streamed into links; if not, links only send the text that is
            known beforehand.
        running: by agent, the calls whose text has not been delivered to the other agents yet.
        caller: the agent that called last; empty before the first call.
        tools: the requests of agents whose tools run.
        links: the open links.
        reported_declines: unlinked agents, each with a kind of reason that has been reported.

    Planning runs in the background of the agents' calls: no call waits for a link, and a failure
    costs only the link.
    """

    def __init__(
        self, listener: Listener, settings: LinkSettings, *, kv_share: float = 1.0
    ) -> None:
        if not 0 <= kv_share <= 1:
            raise ValueError(f"kv_share is {kv_share!r}; it must be a number from 0 to 1")
        self.listener = listener
        self.settings = settings
        self.session = Session(settings.session_headers)
        self.streams = settings.ahead == "text"
        self.output_lengths = OutputLengths()
        self.host = TaskHost("A link failed; its agents run unlinked")
        self.running: dict[str, LinkedCall] = {}
        self.caller = ""
        self.reported_declines: set[tuple[str, str]] = set()
        self.links = Links(self, kv_share)
        self.tools = RunningTools(self.host, self.plan, self.given_up)
        # Replaced when the run takes another course: earlier plans then open no links.
        self._course = object()
        self._has_begun = False  # Whether an agent has called in this run.
        # The channels to the engines, by URL and key.
        self._channels: dict[tuple[str, str | None], CallChannel] = {}
        self._hears = False  # Whether there was a link in this run.
        self._planning = SingleFlight(self.host, self._plan)
        self._watching = SingleFlight(self.host, self._watch_end)

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether the team is running."""

    @abstractmethod
    async def upcoming(self, caller: str) -> Sequence[Turn]:
        """Return the turns that may follow, the likeliest first.

        Args:
            caller: the agent that called last.
        """

    @abstractmethod
    async def expect(self, turn: Turn) -> ExpectedRequest | None:
        """Return the request of a turn; ``None`` if it is not known yet.

        Raises:
            NotForecastable: if it cannot be known.
            Exception: any that the agent's own code raises.
        """

    def possible(self) -> set[str]:
        """Return the agents whose links are kept although :meth:`upcoming` does not name them."""
        return set()

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return an agent's request after the tools of an answer (``CallResult.tool_calls``).

        ``None`` if there is none. If this raises an exception, the request is not linked.
        """
        return None

    def run_ended(self) -> None:
        """End every link; a subclass may then plan for the team's next run."""
        self.end_all("unused")

    def agent_of(self, name: str) -> str:
        """Return the agent of the link with a name, for reports of unlinked agents."""
        return name

    def session_of(self, agent: str) -> str:
        """Return the agent whose session a call belongs to. Routers keep it on one engine."""
        return agent

    def channel_to(self, engine: EngineClient) -> CallChannel:
        """Return the channel to an engine, which opens with the run's first link."""
        key = (engine.url, engine.authorization)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = CallChannel(engine, self.host)
        channel.engine = engine  # Earlier clients may be closed.
        if self._hears:
            channel.open()
        return channel

    def link_opened(self, link: Link) -> None:
        """Hear the run's calls from now on, and put their texts into the link."""
        self._hears = True
        for channel in self._channels.values():
            channel.open()
        self.link_extended(link)

    def link_extended(self, link: Link) -> None:
        """Put the texts of running calls into a link that waits for them."""
        for call in self.running.values():
            if link.waits_for(call.agent):
                call.text._feed_to(link)

    def waiting_for(self, agent: str) -> list[Link]:
        """Return the links whose prompts have an open slot for this agent's text."""
        return [link for link in self.links if link.waits_for(agent)]

    def take_link(self, agent: str, url: str) -> Link | None:
        """Remove the link for a call that is about to be sent to ``url``, and return it."""
        return self.links.take(agent, url)

    def end_all(self, reason: str) -> None:
        """End every link: no call that could use one will come."""
        self._course = object()
        self._planning.drop_pending()
        self.links.end_all(reason)
        for agent in list(self.tools):
            self.tools.end(agent)
        self.running.clear()
        channels, self._channels, self._hears = [*self._channels.values()], {}, False
        for channel in channels:
            channel.close()
        self._has_begun = False

    def begin(
        self, agent: str, request: CallRequest, rewritten: str | None = None, linkable: bool = True
    ) -> LinkedCall:
        """Return the observer of a call that is about to be sent, and plan the calls after it.

        Args:
            rewritten: why other agents never get this text unchanged; ``None`` if they do.
            linkable: whether there can be a link to the agent at all.
        """
        self._course = object()
        self.tools.end(agent)
        own_link = self.take_link(agent, request.engine)
        unlinked = self._why_unlinked(agent, linkable)
        self.links.end_attempt(agent)
        self._has_begun = True
        call = LinkedCall(self, agent, request, own_link, rewritten=rewritten, unlinked=unlinked)
        for link in self.waiting_for(agent):
            call.text._feed_to(link)
        # The text of a complete call has been delivered by now, unless its team waits for another
        # agent.
        incomplete = [other for other in self.running.values() if not other.text.is_complete]
        self.running = {other.agent: other for other in [*incomplete, call]}
        self.caller = agent
        self.plan()
        return call

    def why_unplanned(self, agent: str) -> str:
        """Return why no link was planned to an agent that is about to call, for reports."""
        if not self._has_begun:
            return FIRST
        return reasons.OWN_TURN if agent == self.caller else reasons.UNEXPECTED

    def _why_unlinked(self, agent: str, linkable: bool) -> str:
        """Return why an agent that is about to call has no link; see :meth:`begin`."""
        if self.settings.ahead == "nothing":
            return reasons.NO_LINKS
        why = self.links.why(agent)
        is_planning = self._has_begun and self._planning.is_running
        if why in (None, reasons.MISPREDICTED) and linkable and is_planning:
            why = reasons.UNFINISHED
        return self.why_unplanned(agent) if why is None else why.reason

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        """Complete the text, or take it back from links if others will not get it."""
        if result.usage is not None:
            self.output_lengths.add(call.agent, result.usage.completion_tokens)
        if result.tool_calls is not None and self.settings.ahead != "nothing":
            self._expect_after_tools(call.agent, result.tool_calls)
        if not self.streams:
            return
        is_early = bool(call.text.written)
        if result.is_forwarded and not call.is_rewritten:
            if not is_early and (reason := call.why_unheard) is not None:
                self._report_held_back(call, reason)
            call.text.finish(result.text)
        else:
            # Other agents get another text: the result of a tool call, or a rewritten text.
            call.text.withdraw()
            self.call_held_back(call, call.hold_reason or "it calls tools")

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        """Note that a call has ended without giving text to other agents; links keep waiting."""
        self._report_held_back(call, reason)

    def _report_held_back(self, call: LinkedCall, reason: str) -> None:
        for link in self.waiting_for(call.agent):
            agent, url = link.agent, link.engine.url
            self.listener(LinkWaits(agent=agent, engine=url, upstream=call.agent, reason=reason))
            level = level_once(url, reason, logging.INFO)
            logger.log(level, "%s reads %s when it is complete: %s.", agent, call.agent, reason)

    def call_failed(self, call: LinkedCall) -> None:
        self.drop_call(call)

    def drop_call(self, call: LinkedCall) -> None:
        """Note that links do not wait for the text of a call any more."""
        if self.running.get(call.agent) is call:
            del self.running[call.agent]

    def given_up(self, request: RequestAfterTools, reason: str) -> None:
        self.links.end(request.agent, reason)

    def plan(self) -> None:
        """Bring the links up to date in the background."""
        if self.settings.ahead != "nothing":
            self._planning.request()
            self._watching.start_if_idle()

    async def link_all(self, turns: Sequence[Turn]) -> None:
        """Make a link for each turn that has none; stop if the run takes another course."""
        is_current = self._make_check()
        await self.links.reconcile(await self._expect_all(turns, is_current), is_current)

    async def _plan(self) -> None:
        await anyio.sleep(DELIVERY_SECONDS)
        is_current = self._make_check()
        turns = await self.upcoming(self.caller)
        self.links.end_missing({turn.agent for turn in turns} | self.possible() | {*self.tools})
        for request in self.tools.values():
            self.host.start(partial(self._link_after_tools, request, is_current))
        others = [turn for turn in turns if turn.agent not in self.tools]
        expected = await self._expect_all(others, is_current)
        # In the background, so that the next plan does not wait for engines that are slow.
        self.host.start(partial(self.links.reconcile, expected, is_current))

    def _make_check(self) -> IsCurrent:
        """Return a function that returns whether the run takes the same course as now.

        The course changes when another call begins, the run ends, or a turn's first writers end:
        then their messages are being delivered, and the next call has the links planned again.
        """
        course = self._course

        def is_current(turn: Turn) -> bool:
            calls = [self.running.get(name) for name in turn.after[0]] if turn.after else []
            is_writing = all(call is None or not call.text.is_complete for call in calls)
            return course is self._course and is_writing

        return is_current

    async def _expect_all(
        self, turns: Sequence[Turn], is_current: IsCurrent, expect: Expect | None = None
    ) -> list[ExpectedRequest]:
        """Return the requests of turns that need a link, in order, since some build on others."""
        found: list[ExpectedRequest] = []
        for turn in turns:
            with self.links.declining(turn.agent, None):
                if not is_current(Turn(turn.agent)) or not self.links.needs(turn):
                    continue
                self.links.begin_attempt(turn.agent)
                if not is_current(turn):
                    continue
                expected = await (expect or self.expect)(turn)
                if expected is None:
                    self.links.end_attempt(turn.agent)
                else:
                    found.append(expected)
        return found

    def _expect_after_tools(self, agent: str, answer: object) -> None:
        """Link the certain part of an agent's request after its tools."""
        try:
            request = self.request_after_tools(agent, answer)
        except Exception as error:
            # The agent must get its answer, whatever is wrong with the prediction.
            self.links.decline(agent, error)
            return
        if request is not None:
            self.tools.add(request)

    async def _link_after_tools(self, request: RequestAfterTools, is_current: IsCurrent) -> None:
        def is_expected(turn: Turn) -> bool:
            return is_current(turn) and not request.is_given_up

        expected = await self._expect_all([Turn(request.agent)], is_expected, request.expect)
        await self.links.reconcile(expected, is_expected)

    async def _watch_end(self) -> None:
        """Poll until the run has ended, since a team does not report its end. End all links."""
        polls_after_end = 0
        # Two polls, since an agent may call its model with the team's messages after the end.
        while polls_after_end < 2:
            await anyio.sleep(END_POLL_SECONDS)
            polls_after_end = 0 if self.is_running else polls_after_end + 1
        self.run_ended()


class LinkedCall(CallObserver):
    """A request of an agent of a linked team.

    Args:
        agent: the name of the agent that makes the request.
        own_link: the link to the request's prompt, if any; the request claims its stream.
        rewritten: see :meth:`LinkPlanner.begin`.
        unlinked: why there is no ``own_link``, for reports.

    Attributes:
        text: the text that other agents get.
        takes_text: whether they get it as it arrives.
        hold_reason: why they do not get it as it arrives; ``None`` if they do.
    """

    def __init__(
        self,
        planner: LinkPlanner,
        agent: str,
        request: CallRequest,
        own_link: Link | None = None,
        *,
        rewritten: str | None = None,
        unlinked: str = "",
    ) -> None:
        report = CallReporter(
            planner.listener, agent=agent, engine=request.engine, model=request.model
        )
        super().__init__(report)
        self.agent = agent
        self.text = Text(agent)
        self.is_rewritten = rewritten is not None
        self.hold_reason = rewritten or request.hold_reason
        self.takes_text = planner.streams and self.hold_reason is None
        if self.takes_text and request.client is not None:
            self.channel = planner.channel_to(request.client)
        self.prompt_stream_id = own_link.claim() if own_link is not None else None
        self.headers = {
            **planner.session.headers(planner.session_of(agent)),
            **planner.output_lengths.headers(agent),
        }
        self._planner = planner
        self._engine_url = request.engine
        self._is_over = False
        self._own_link = own_link
        if own_link is None:
            report.started(None, unlinked)
        else:
            report.started(own_link.used_id, own_link.unused_reason)

    @property
    def why_unheard(self) -> str | None:
        """Why other agents get its text only when it is complete, if there is a reason."""
        if self.hold_reason is not None or self.channel is None:
            return self.hold_reason
        return self.channel.problem

    def on_named(self, call_id: str) -> None:
        if self.takes_text:
            self.text.name_call(self._engine_url, call_id)

    def on_text(self, text: str) -> None:
        if self._is_over:
            return  # Another thread was late.
        super().on_text(text)
        if self.takes_text:
            self.text.write(text)

    def on_finish(self, result: CallResult) -> None:
        self._is_over = True
        super().on_finish(result)
        self._planner.call_answered(self, result)
        if self._own_link is not None and self._own_link.is_unnamed:
            self.release_stream()

    def on_failure(self, error: BaseException) -> None:
        self._is_over = True
        super().on_failure(error)
        self._planner.call_failed(self)
        self.text.fail(error)
        # If the request has not reached the engine, the engine still keeps the stream.
        self.release_stream()

    def release_stream(self) -> None:
        if self._own_link is not None:
            self._planner.host.start_cleanup(self._own_link.delete_stream)
