"""Keep a link to each agent that may call next, while other agents write (:class:`LinkPlanner`).

When is there a link to an agent? :meth:`LinkPlanner.plan` brings the links up to date in the
background: ``_plan`` asks which turns may follow, ``_forecast`` what each of them will ask, and
``_link`` opens a link, or extends the one that is there. A link is kept while its forecast holds,
until its agent calls (``take_link``) or cannot be next any more, or the run ends.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio

from flashmoa._concurrency import SingleFlight, TaskHost, setting
from flashmoa.engine import EngineClient
from flashmoa.engine.client import request_headers
from flashmoa.errors import EngineError, PluginMissing
from flashmoa.link import reasons
from flashmoa.link.calls import CallRequest, CallResult, OutputLengths
from flashmoa.link.forecasts import Forecast, HeldRequests, RequestAfterTools, Turn
from flashmoa.link.hearing import CallChannel
from flashmoa.link.link import Link, kind_of, report_no_link
from flashmoa.link.linked_call import LinkedCall
from flashmoa.link.options import LinkSettings, Session
from flashmoa.link.prompt import NotForecastable, Prompt
from flashmoa.link.prompt_feed import level_once, report_plain_engine
from flashmoa.observe import LinkDeclined, LinkWaits, Listener
from flashmoa.observe.events import FIRST

logger = logging.getLogger(__name__)

# A message that is published reaches every agent within a few rounds of the event loop.
DELIVERY_SECONDS = 0.002
END_POLL_SECONDS = 0.2
_MOST_REPORTED = 1000
_CHARACTERS_PER_TOKEN = 3

Predict = Callable[[Turn], Awaitable[Forecast | None]]


class LinkPlanner(ABC):
    """Plans the links of one team.

    Each agent framework has a subclass, which knows which agents may call next (:meth:`upcoming`)
    and what they will send (:meth:`forecast`). It tells the planner of each call by :meth:`begin`.

    Args:
        listener: receives the events.
        settings: says what is linked ahead, and what happens when agents fail.
        kv_share: the share, from 0 to 1, of an engine's KV pool for links to agents that need not
            be next.

    Attributes:
        streams: whether text is streamed into links; if not, links only send what is known
            beforehand.
        running: by agent, the calls whose text has not been delivered to the other agents yet.
        caller: the agent that called last; empty before the first call.
        held: the requests of agents whose tools run.
        changes: number of events that make a plan out of date: calls, and ends of runs. A plan
            compares it after each ``await``.

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
        self.changes = 0
        # Unlinked agents, each with a kind of reason that has been reported; each is reported once.
        self.reported_declines: set[tuple[str, str]] = set()
        self._kv_share = kv_share
        self.held = HeldRequests(self.host, self.plan, self.given_up)
        # By agent, the link to it and what it was made from, and why there is no link, if one was
        # tried.
        self._kept: dict[str, tuple[Link, Forecast]] = {}
        self._unlinked: dict[str, reasons.Unlinked] = {}
        # Agents with a link that could not be next at the last plan.
        self._idle: set[str] = set()
        self._has_begun = False  # Whether an agent has called in this run.
        # By URL: links to one engine are made one after the other, the likeliest first.
        self._making_links: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        # By URL and key, what brings the text of whole answers.
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
    async def forecast(self, turn: Turn) -> Forecast | None:
        """Return what the agent of a turn will send; ``None`` if that is not known yet.

        Raises:
            NotForecastable: if it cannot be known.
            Exception: any that the agent's own code raises.
        """

    def possible(self) -> set[str]:
        """Return the agents whose links are kept although :meth:`upcoming` does not name them."""
        return set()

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return what an agent asks after the tools of an answer (``CallResult.tool_calls``).

        ``None`` if it asks nothing. If this raises an exception, the request is not linked.
        """
        return None

    def run_ended(self) -> None:
        """End every link; a subclass may then plan for the team's next run."""
        self.end_all("unused")

    @property
    def links(self) -> list[Link]:
        return [link for link, _ in self._kept.values()]

    def channel_to(self, engine: EngineClient) -> CallChannel:
        """Return what hears the calls to an engine, from the run's first link on."""
        key = (engine.url, engine.authorization)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = CallChannel(engine, self.host)
        channel.engine = engine  # Earlier ones may be closed.
        if self._hears:
            channel.open()
        return channel

    def waiting_for(self, agent: str) -> list[Link]:
        """Return the links whose prompts have an open slot for this agent's text."""
        return [link for link in self.links if link.waits_for(agent)]

    def take_link(self, agent: str, url: str) -> Link | None:
        """Remove the link for a call that is about to be sent to ``url``, and return it.

        A link that was made for a different call is ended instead, and ``None`` returned.
        """
        link, forecast = self._kept.pop(agent, (None, None))
        if link is None or forecast is None:
            return None
        if link.engine.url == url and forecast.holds(link.prompt, None):
            return link
        link.end("mispredicted")
        self._unlinked.setdefault(agent, reasons.MISPREDICTED)
        return None

    def end_link(self, agent: str, reason: str) -> None:
        """End the link to an agent, if there is one."""
        if agent in self._kept:
            self._kept.pop(agent)[0].end(reason)

    def end_all(self, reason: str) -> None:
        """End every link, since no call that could use one will come."""
        self.changes += 1
        self._planning.drop_pending()
        for agent in list(self._kept):
            self.end_link(agent, reason)
        for agent in list(self.held):
            self.held.let_come(agent)
        self.running.clear()
        channels, self._channels, self._hears = [*self._channels.values()], {}, False
        for channel in channels:
            channel.close()
        unlinked = self._unlinked.items()
        self._unlinked = {name: why for name, why in unlinked if why.until == "forecast"}
        self._has_begun = False

    def begin(
        self, agent: str, request: CallRequest, rewritten: str | None = None, linkable: bool = True
    ) -> LinkedCall:
        """Return the observer of a call that is about to be sent, and plan the calls after it.

        Args:
            rewritten: why other agents never get this text unchanged; ``None`` if they do.
            linkable: whether there can be a link to the agent at all.
        """
        self.changes += 1
        self.held.let_come(agent)
        own_link = self.take_link(agent, request.engine)
        unlinked = self._why_unlinked(agent, linkable)
        self._end_attempt(agent)
        self._has_begun = True
        call = LinkedCall(self, agent, request, own_link, rewritten=rewritten, unlinked=unlinked)
        for link in self.waiting_for(agent):
            call.text._follow(link)
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
        """Return why an agent that is about to call would have no link; see :meth:`begin`."""
        if self.settings.ahead == "nothing":
            return reasons.NO_LINKS
        why = self._unlinked.get(agent)
        is_planning = self._has_begun and self._planning.is_running
        if why in (None, reasons.MISPREDICTED) and linkable and is_planning:
            why = reasons.UNFINISHED
        return self.why_unplanned(agent) if why is None else why.reason

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        """Complete the text, or take it back from links if others will not get it."""
        if result.usage is not None:
            self.output_lengths.add(call.agent, result.usage.completion_tokens)
        if result.tool_calls is not None and self.settings.ahead != "nothing":
            self._hold_next(call.agent, result.tool_calls)
        if not self.streams:
            return
        is_early = bool(call.text.written)
        if result.is_forwarded and not call.is_rewritten:
            if not is_early and (reason := call.why_unheard) is not None:
                self._report_held_back(call, reason)
            call.text.finish(result.text)
        else:
            # Other agents get something else: the result of a tool call, or a rewritten text.
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
        """Note that a request failed."""
        self.drop_call(call)

    def drop_call(self, call: LinkedCall) -> None:
        """Note that links need not wait for the text of a call any more."""
        if self.running.get(call.agent) is call:
            del self.running[call.agent]

    def given_up(self, request: RequestAfterTools, reason: str) -> None:
        """End the link of a request after tools that will not come."""
        self.end_link(request.agent, reason)

    def agent_of(self, name: str) -> str:
        """Return the agent whose link has a name, by which its reasons to be unlinked are told."""
        return name

    def session_of(self, agent: str) -> str:
        """Return the agent whose session a call belongs to; routers keep one on one engine."""
        return agent

    def decline(self, agent: str, problem: Exception) -> None:
        """Leave an agent unlinked this time, and report why; each kind of reason is reported once.

        Args:
            problem: what was raised when its next prompt was predicted. If that is no
                NotForecastable, the agent's own code failed, in its tools or its context.
        """
        reason, kind = str(problem), kind_of(problem.__cause__ or problem)
        if not isinstance(problem, NotForecastable):
            reason = f"predicting its next prompt failed: {problem!r}"
        elif problem.__cause__ is None:
            kind = reason  # It is one of FlashMoA's own sentences.
        self._unlinked[agent] = reasons.Unlinked(reason, "forecast")
        self.end_link(agent, "unused")
        if (self.agent_of(agent), kind) in self.reported_declines:
            return
        if len(self.reported_declines) >= _MOST_REPORTED:
            self.reported_declines.clear()
        self.reported_declines.add((self.agent_of(agent), kind))
        logger.warning("%s runs unlinked: %s", agent, reason)
        self.listener(LinkDeclined(agent=agent, engine="", reason=reason))

    def plan(self) -> None:
        """Bring the links up to date in the background."""
        if self.settings.ahead != "nothing":
            self._planning.request()
            self._watching.start_if_idle()

    async def link_all(self, turns: Sequence[Turn], changes: int) -> None:
        """Make a link for each turn that has none; stop if the run has changed.

        Args:
            changes: the planner's ``changes`` when ``turns`` were determined.
        """
        await self._link_forecasts(await self._forecast_all(turns, changes, self.forecast), changes)

    async def _plan(self) -> None:
        await anyio.sleep(DELIVERY_SECONDS)
        changes = self.changes
        turns = await self.upcoming(self.caller)
        self._end_idle({turn.agent for turn in turns} | self.possible() | self.held.keys())
        for request in self.held.values():
            self.host.start(partial(self._link_held, request, changes))
        others = [turn for turn in turns if turn.agent not in self.held]
        forecasts = await self._forecast_all(others, changes, self.forecast)
        # In the background, so that the next plan does not wait for engines that are slow.
        self.host.start(partial(self._link_forecasts, forecasts, changes))

    def _end_idle(self, possible: set[str]) -> None:
        """End the links to agents that are missing from ``possible`` for the second time in a row.

        Once is not enough, since a manager asks several agents to speak one after the other.
        """
        idle = self._kept.keys() - possible
        for agent in idle & self._idle:
            self.end_link(agent, "unused")
        self._idle = idle

    async def _forecast_all(
        self, turns: Sequence[Turn], changes: int, predict: Predict
    ) -> list[Forecast]:
        """Return the forecasts of turns that need one, in order, since some build on others."""
        forecasts = [
            await self._forecast(turn, predict) for turn in turns if changes == self.changes
        ]
        return [forecast for forecast in forecasts if forecast is not None]

    async def _forecast(self, turn: Turn, predict: Predict) -> Forecast | None:
        """Return the forecast of one turn, unless it has a link that fits or cannot have one."""
        why = self._unlinked.get(turn.agent)
        if why is reasons.PLAIN_ENGINE:
            return None
        forecast: Forecast | None = None
        with self._declining(turn.agent, None):
            if self._has_link_for(turn):
                return None
            # It stays unfinished until there is a link. If it is given up, the agents were faster.
            if why is None or why.until == "call":
                self._unlinked[turn.agent] = reasons.UNFINISHED
            if not self._is_current(turn, self.changes):
                return None
            forecast = await predict(turn)
            if forecast is None:
                self._end_attempt(turn.agent)
        return forecast

    async def _link_forecasts(self, forecasts: Sequence[Forecast], changes: int) -> None:
        """Make or update a link for each forecast; no engine delays the links to others."""

        async def link_in_order(url: str) -> None:
            async with self._making_links[url]:
                for forecast in forecasts:
                    if forecast.engine.url == url:
                        await self._link(forecast, changes)

        async with anyio.create_task_group() as group:
            for url in {forecast.engine.url for forecast in forecasts}:
                group.start_soon(link_in_order, url)

    async def _link(self, forecast: Forecast, changes: int) -> None:
        """Make a link by a forecast, or bring it up to date."""
        turn, agent = forecast.turn, forecast.turn.agent
        with self._declining(agent, forecast.engine):
            # An earlier plan may have made the link while this one waited for the engine.
            if not self._is_current(turn, changes) or self._has_link_for(turn):
                return
            prompt = await forecast.prompt()
            if self._unlinked.get(agent) not in (None, reasons.PLAIN_ENGINE):
                self._unlinked[agent] = reasons.UNFINISHED
            if not self._is_current(turn, changes):
                return
            link = self._kept[agent][0] if agent in self._kept else None
            if link is not None and link.has_expired and _is_same(link.prompt, prompt):
                # No request came in time for this very prompt.
                self._end_attempt(agent)
            elif link is None or link.is_over:
                await self._open(forecast, prompt, changes)
            elif _is_same(link.prompt, prompt) or link.become(prompt):
                self._kept[agent] = link, forecast
                self._follow_running(link)
            else:
                # The new prompt does not begin with the text that was sent.
                self.end_link(agent, "mispredicted")
                await self._open(forecast, prompt, changes)

    async def _open(self, forecast: Forecast, prompt: Prompt, changes: int) -> None:
        turn, engine = forecast.turn, forecast.engine
        if not turn.sure and (reason := await self._why_no_room(engine, prompt)) is not None:
            self._unlinked[turn.agent] = reasons.Unlinked(reason)
            self.listener(LinkDeclined(agent=turn.agent, engine=engine.url, reason=reason))
            return
        follows = await engine.follows_calls()
        if not self._is_current(turn, changes):
            return
        link = Link(
            engine,
            prompt,
            agent=turn.agent,
            on_failure=self.settings.policy(turn.agent),
            namespace=forecast.namespace,
            expected_output_tokens=self.output_lengths.expect(turn.agent),
            expect=self.output_lengths.expect,
            follows=follows,
            listener=self.listener,
        )
        self._kept[turn.agent] = link, forecast
        self._hears = True
        for channel in self._channels.values():
            channel.open()
        self._end_attempt(turn.agent)
        self._follow_running(link)
        with setting(request_headers, self.session.headers(self.session_of(turn.agent))):
            await link.start(self.host)

    async def _why_no_room(self, engine: EngineClient, prompt: Prompt) -> str | None:
        """Return why there can be no link to a prompt that may never come; ``None`` if there can.

        Links that may never be used get a share of each engine's KV pool.

        Raises: EngineError if the engine does not report the size of its KV pool.
        """
        try:
            pool_tokens = await engine.kv_pool_tokens()
        except PluginMissing:
            return (
                "its engine has no plugin; only prompts that are sure to come are prefilled there"
            )
        others = (link for link, forecast in self._kept.values() if not forecast.turn.sure)
        there = (link for link in others if link.engine.url == engine.url and not link.is_over)
        characters = sum(len(each.stable()) for each in [prompt, *(link.prompt for link in there)])
        if characters <= _CHARACTERS_PER_TOKEN * self._kv_share * pool_tokens:
            return None
        return (
            "the share of the KV pool for links that may go unused is taken by agents that are "
            "likelier to speak"
        )

    def _follow_running(self, link: Link) -> None:
        for call in self.running.values():
            if link.waits_for(call.agent):
                call.text._follow(link)

    def _has_link_for(self, turn: Turn) -> bool:
        link, forecast = self._kept.get(turn.agent, (None, None))
        if link is None or forecast is None or (link.is_over and self.streams):
            return False
        return forecast.holds(link.prompt, turn)

    def _is_current(self, turn: Turn, changes: int) -> bool:
        """Return whether the run is as it was, and the writers that come first still write.

        If not, their messages are being delivered, and the next call has the links planned again.
        """
        calls = [self.running.get(name) for name in turn.after[0]] if turn.after else []
        is_writing = all(call is None or not call.text.is_complete for call in calls)
        return changes == self.changes and is_writing

    def _end_attempt(self, agent: str) -> None:
        """Forget the last attempt to link an agent: it has ended well, or the agent has called."""
        if agent in self._unlinked and self._unlinked[agent].until == "call":
            del self._unlinked[agent]

    @contextmanager
    def _declining(self, agent: str, engine: EngineClient | None) -> Generator[None]:
        """Leave an agent unlinked this time if an exception is raised inside."""
        try:
            yield
        except PluginMissing as problem:
            self._unlinked[agent] = reasons.PLAIN_ENGINE
            if engine is not None:
                report_plain_engine(engine, problem)
        except EngineError as error:
            self._unlinked[agent] = reasons.Unlinked(f"{error}")
            report_no_link(agent, "" if engine is None else engine.url, error, self.listener)
        except Exception as error:
            self.decline(agent, error)

    def _hold_next(self, agent: str, answer: object) -> None:
        """Link what an agent asks after its tools, as far as it is certain."""
        try:
            request = self.request_after_tools(agent, answer)
        except Exception as error:
            # Whatever is wrong with a prediction, the agent's answer must reach it.
            self.decline(agent, error)
            return
        if request is not None:
            self.held.hold(request)

    async def _link_held(self, request: RequestAfterTools, changes: int) -> None:
        forecasts = await self._forecast_all([request.turn], changes, request.forecast)
        await self._link_forecasts(forecasts, changes)
        if request.is_given_up:
            self.end_link(request.agent, "abort")

    async def _watch_end(self) -> None:
        """Poll until the run has ended, since a team does not report its end. End all links."""
        polls_after_end = 0
        # Two polls, since an agent may call its model with the team's messages after the end.
        while polls_after_end < 2:
            await anyio.sleep(END_POLL_SECONDS)
            polls_after_end = 0 if self.is_running else polls_after_end + 1
        self.run_ended()


def _is_same(prompt: Prompt, other: Prompt) -> bool:
    return prompt.is_complete and other.is_complete and prompt.stable() == other.stable()
