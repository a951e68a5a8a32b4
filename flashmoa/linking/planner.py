"""Keep a link to each agent that may call next, while other agents write (:class:`LinkPlanner`)."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio

from flashmoa._concurrency import SingleFlight, TaskHost
from flashmoa.engine import EngineClient, EngineError, PluginMissing
from flashmoa.linking.link import Ahead, Link, failure_level, kind_of
from flashmoa.linking.linked_call import CallOwner, LinkedCall
from flashmoa.linking.observed_call import CallRequest
from flashmoa.linking.output_lengths import OutputLengths
from flashmoa.linking.own_turn import OwnTurn, OwnTurns
from flashmoa.linking.placeholders import NotForecastable
from flashmoa.linking.plain_feed import report_plain_engine
from flashmoa.linking.planned_links import Forecast, KvShare, PlannedLinks, Turn
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.run_state import Attempt, RunState
from flashmoa.observe import LinkDeclined, LinkWaits, Listener

logger = logging.getLogger(__name__)

# A message that is published reaches every agent within a few rounds of the event loop.
DELIVERY_SECONDS = 0.002
END_POLL_SECONDS = 0.2
_MOST_REPORTED = 1000

Predict = Callable[[Turn], Awaitable[Forecast | None]]


class LinkPlanner(CallOwner):
    """Plans the links of one team.

    Each agent framework has a subclass, which knows which agents may call next (:meth:`upcoming`)
    and what they will send (:meth:`forecast`).

    Args:
        listener: receives the events.
        ahead: how much of a prompt is sent before its request.
        kv_share: the share of an engine's KV pool for links to agents that need not be next.

    Planning runs in the background of the agents' calls: no call waits for a link, and a failure
    costs only the link.
    """

    def __init__(self, listener: Listener, *, ahead: Ahead = "text", kv_share: float = 1.0) -> None:
        self.listener = listener
        self.streams = ahead == "text"
        self.output_lengths = OutputLengths()
        self.host = TaskHost("A link failed; its agents run unlinked")
        self._ahead: Ahead = ahead
        self._links = PlannedLinks(streams=self.streams)
        self.own_turns = OwnTurns(self.host.start, self.plan, self._links.end)
        self._run = RunState()
        self._kv_share = KvShare(kv_share)
        # Unlinked agents, each with a kind of reason that has been reported; each is reported once.
        self._reported_declines: set[tuple[str, str]] = set()
        # By the engine's URL. Links to one engine are made one after the other, the likeliest
        # first, while those to others are made at the same time.
        self._making_links: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
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

    def take_link(self, agent: str, url: str) -> Link | None:
        """Remove the link for a call that is about to be sent to ``url``, and return it."""
        return self._links.take(agent, url)

    async def after_run(self) -> None:
        """Do nothing; a subclass may plan for the team's next run when a run has ended."""

    def begin(
        self, agent: str, request: CallRequest, *, rewrite_reason: str | None, linkable: bool = True
    ) -> LinkedCall:
        """Return the observer of a call that is about to be sent, and plan the calls after it.

        Args:
            rewrite_reason: see :class:`LinkedCall`.
            linkable: whether there can be a link to the agent at all.
        """
        run = self._run
        run.changes += 1
        self.own_turns.drop(agent)
        own_link = self.take_link(agent, request.engine)
        attempt = run.attempts.get(agent)
        unplanned = attempt is Attempt.UNFINISHED or (attempt is None and self._planning.is_running)
        missed_link = own_link is None and unplanned and linkable
        run.drop_unfinished_attempt(agent)
        call = LinkedCall(
            self, agent, request, own_link, rewrite_reason=rewrite_reason, missed_link=missed_link
        )
        for link in self.waiting_for(agent):
            call.text.follow(link)
        run.add_call(call)
        self.plan()
        return call

    def plan(self) -> None:
        """Bring the links up to date in the background."""
        if self._ahead != "nothing":
            self._planning.request()
            self._watching.start_if_idle()

    def waiting_for(self, agent: str) -> list[Link]:
        return self._links.waiting_for(agent)

    def call_finished(self, call: LinkedCall) -> None:
        """Do nothing; a subclass may plan again now that the text is complete."""

    def own_turn(self, agent: str, answer: object) -> OwnTurn | None:
        """Return what an agent asks after the tools of an answer (``CallResult.tool_calls``).

        ``None`` if it asks nothing. If this raises an exception, the request is not linked.
        """
        return None

    def tools_called(self, call: LinkedCall, answer: object) -> None:
        """Hold the agent's next request while its tools run, if it will make one."""
        try:
            turn = self.own_turn(call.agent, answer) if self._ahead != "nothing" else None
        except Exception as error:
            # Whatever is wrong with a prediction, the agent's answer must reach it.
            self.decline(call.agent, error)
        else:
            if turn is not None:
                self.own_turns.hold(turn)

    def call_taken_back(self, call: LinkedCall) -> None:
        for link in self.waiting_for(call.agent):
            link.end("abort")
        self.call_failed(call)
        # What was certain before the text still is, so it is linked again.
        self.plan()

    def call_failed(self, call: LinkedCall) -> None:
        if self._run.running.get(call.agent) is call:
            del self._run.running[call.agent]

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        for link in self.waiting_for(call.agent):
            agent, url = link.agent, link.engine.url
            self.listener(LinkWaits(agent=agent, engine=url, upstream=call.agent, reason=reason))

    def release(self, link: Link) -> None:
        self.host.start_cleanup(link.delete_stream)

    def end_all(self, reason: str) -> None:
        """End every link, since no call that could use one will come."""
        self._planning.drop_pending()
        self._links.end_all(reason)
        self.own_turns.clear()
        self._run.end_run()

    async def _plan(self) -> None:
        await anyio.sleep(DELIVERY_SECONDS)
        changes = self._run.changes
        turns = await self.upcoming(self._run.caller)
        held = self.own_turns.agents()
        self._links.end_idle({turn.agent for turn in turns} | self.possible() | held)
        for own in self.own_turns.all():
            self.host.start(partial(self._link_own, own, changes))
        others = [turn for turn in turns if turn.agent not in held]
        forecasts = await self._forecast_all(others, changes, self.forecast)
        # In the background, so that the next plan does not wait for engines that are slow.
        self.host.start(partial(self._link_forecasts, forecasts, changes))

    async def link_all(self, turns: Sequence[Turn], changes: int) -> None:
        """Make a link for each turn that has none; stop if the run has changed.

        Args:
            changes: the run's ``changes`` when ``turns`` were determined.
        """
        await self._link_forecasts(await self._forecast_all(turns, changes, self.forecast), changes)

    async def _link_own(self, own: OwnTurn, changes: int) -> None:
        forecasts = await self._forecast_all([own.turn], changes, own.forecast)
        await self._link_forecasts(forecasts, changes)
        if own.is_given_up:
            self._links.end(own.agent, "abort")

    async def _forecast_all(
        self, turns: Sequence[Turn], changes: int, predict: Predict
    ) -> list[Forecast]:
        """Return the forecasts of turns that need one, in order, since some build on others."""
        forecasts = [
            await self._forecast(turn, predict) for turn in turns if changes == self._run.changes
        ]
        return [forecast for forecast in forecasts if forecast is not None]

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

    async def _watch_end(self) -> None:
        """Poll until the run has ended, since a team does not report its end. End all links."""
        polls_after_end = 0
        # Two polls, since an agent may call its model with the team's messages after the end.
        while polls_after_end < 2:
            await anyio.sleep(END_POLL_SECONDS)
            polls_after_end = 0 if self.is_running else polls_after_end + 1
        self.end_all("unused")
        self.host.start(self.after_run)

    async def _forecast(self, turn: Turn, predict: Predict) -> Forecast | None:
        """Return the forecast of one turn, unless it has a link that fits or cannot have one."""
        agent, attempts = turn.agent, self._run.attempts
        if attempts.get(agent) is Attempt.PLAIN_ENGINE:
            return None
        forecast: Forecast | None = None
        with self._declining(agent, None):
            if self._links.fits(turn):
                return None
            # The attempt stays unfinished until there is a link. If it is given up from here on,
            # the agents were faster.
            attempts.setdefault(agent, Attempt.UNFINISHED)
            if not self._run.is_current(turn):
                return None
            forecast = await predict(turn)
            if forecast is None:
                self._run.drop_unfinished_attempt(agent)
        return forecast

    async def _link(self, forecast: Forecast, changes: int) -> None:
        """Make a link by a forecast, or bring it up to date."""
        turn, attempts = forecast.turn, self._run.attempts
        with self._declining(turn.agent, forecast.engine):
            # An earlier plan may have made the link while this one waited for the engine.
            if not self._is_current(turn, changes) or self._links.fits(turn):
                return
            prompt = await forecast.prompt()
            if attempts.get(turn.agent) is Attempt.DECLINED:
                attempts[turn.agent] = Attempt.UNFINISHED
            if not self._is_current(turn, changes):
                return
            if self._links.has_expired(turn.agent, prompt):
                self._run.drop_unfinished_attempt(turn.agent)
            elif link := self._links.extend(prompt, forecast):
                self._follow_running(link)
            else:
                await self._open(forecast, prompt, changes)

    def _is_current(self, turn: Turn, changes: int) -> bool:
        return changes == self._run.changes and self._run.is_current(turn)

    @contextmanager
    def _declining(self, agent: str, engine: EngineClient | None) -> Generator[None]:
        """Leave an agent unlinked this time if an exception is raised inside."""
        try:
            yield
        except PluginMissing as problem:
            self._run.attempts[agent] = Attempt.PLAIN_ENGINE
            if engine is not None:
                report_plain_engine(engine, problem)
        except EngineError as error:
            self._run.drop_unfinished_attempt(agent)
            url = "" if engine is None else engine.url
            logger.log(failure_level(url, error), "No link to %s this time: %s", agent, error)
            self.listener(LinkDeclined(agent=agent, engine=url, reason=f"{error}"))
        except Exception as error:
            self.decline(agent, error)

    async def _open(self, forecast: Forecast, prompt: Prompt, changes: int) -> None:
        turn, engine = forecast.turn, forecast.engine
        reason: str | None = None
        if not turn.sure:
            reason = await self._kv_share.why_no_room(engine, prompt, self._links.uncertain())
        if reason is not None:
            self._run.drop_unfinished_attempt(turn.agent)
            self.listener(LinkDeclined(agent=turn.agent, engine=engine.url, reason=reason))
            return
        if not self._is_current(turn, changes):
            return
        link = Link(
            engine,
            prompt,
            agent=turn.agent,
            on_failure=forecast.on_failure,
            namespace=forecast.namespace,
            expected_output_tokens=self.output_lengths.expect(turn.agent),
            expect=self.output_lengths.expect,
            listener=self.listener,
        )
        self._links.add(link, forecast)
        self._run.drop_unfinished_attempt(turn.agent)
        self._follow_running(link)
        self.host.start(link.run)

    def _follow_running(self, link: Link) -> None:
        for call in self._run.running.values():
            if link.waits_for(call.agent):
                call.text.follow(link)

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
        self._run.attempts[agent] = Attempt.DECLINED
        self._links.end(agent, "unused")
        if (agent, kind) in self._reported_declines:
            return
        if len(self._reported_declines) >= _MOST_REPORTED:
            self._reported_declines.clear()
        self._reported_declines.add((agent, kind))
        logger.warning("%s runs unlinked: %s", agent, reason)
        self.listener(LinkDeclined(agent=agent, engine="", reason=reason))
