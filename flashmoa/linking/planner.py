"""The planner: a link to everyone who may call next, kept up to date while agents write."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

import anyio

from flashmoa._concurrency import SingleFlight, TaskHost
from flashmoa.engine import EngineError, PluginMissing
from flashmoa.linking.link import Ahead, Link, report_plain_engine
from flashmoa.linking.linked_call import CallOwner, LinkedCall
from flashmoa.linking.observed_call import CallRequest
from flashmoa.linking.placeholders import NotForecastable
from flashmoa.linking.planned_links import Forecast, KvShare, PlannedLinks, Turn
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.run_state import Attempt, RunState
from flashmoa.observe import LinkDeclined, LinkWaits, Listener

logger = logging.getLogger(__name__)

# A message that is published reaches every agent within a few rounds of the event loop.
DELIVERY_SECONDS = 0.002
END_POLL_SECONDS = 0.2


class LinkPlanner(CallOwner):
    """The links of one team; each agent framework has a subclass that answers for its teams:
    :meth:`upcoming`, who may call next, and :meth:`forecast`, what they will send.

    Args:
        ahead: what is sent ahead of requests.
        kv_share: of an engine's KV pool, for links to agents that need not be next.
        listener: is told what happens.

    Everything here runs in the background of the agents' calls: no call waits for a link, and
    whatever goes wrong costs the link alone.
    """

    def __init__(self, listener: Listener, *, ahead: Ahead = "text", kv_share: float = 1.0) -> None:
        self.listener = listener
        self.streams = ahead == "text"
        self.host = TaskHost("A link failed; its agents run unlinked")
        self._ahead: Ahead = ahead
        self._links = PlannedLinks(streams=self.streams)
        self._run = RunState()
        self._kv_share = KvShare(kv_share)
        # What has been declined, by agent and reason: once is enough to say so.
        self._said: set[tuple[str, str]] = set()
        self._planning = SingleFlight(self.host, self._plan)
        self._watching = SingleFlight(self.host, self._watch_end)

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether the team's run goes on."""

    @abstractmethod
    async def upcoming(self, caller: str) -> Sequence[Turn]:
        """Return the turns that may follow, the likeliest first.

        Args:
            caller: who called last.
        """

    @abstractmethod
    async def forecast(self, turn: Turn) -> Forecast | None:
        """Return what the agent of a turn will send; ``None`` where that is not known yet.

        Raises: NotForecastable, and whatever the agent's own code raises.
        """

    def possible(self) -> set[str]:
        """Return agents whose links are kept though :meth:`upcoming` does not name them."""
        return set()

    def take_link(self, agent: str) -> Link | None:
        """Return the link to the prompt of a call that is here, and hold it no longer."""
        return self._links.take(agent)

    async def after_run(self) -> None:
        """Do what is to be done when a run has ended."""

    def begin(
        self, agent: str, request: CallRequest, *, rewritten: str | None, linkable: bool = True
    ) -> LinkedCall:
        """Note a call that goes out.

        Args:
            rewritten: see :class:`LinkedCall`.
            linkable: whether there can be a link to the agent at all.
        """
        run = self._run
        run.changes += 1
        own = self.take_link(agent)
        attempt = run.attempts.get(agent)
        missed = attempt is Attempt.UNFINISHED or (attempt is None and self._planning.is_running)
        early = own is None and missed and linkable
        run.attempt_ended(agent)
        call = LinkedCall(self, agent, request, own, rewritten=rewritten, early=early)
        for link in self.waiting_for(agent):
            call.text.follow(link)
        run.call(call)
        self.plan()
        return call

    def plan(self) -> None:
        """Have the links brought up to date, once for all reasons there are by then."""
        if self._ahead != "nothing":
            self._planning.request()
            self._watching.start_if_idle()

    def waiting_for(self, agent: str) -> list[Link]:
        return self._links.waiting_for(agent)

    def finished(self, call: LinkedCall) -> None:
        """Note that what others get of a call is known in full."""

    def failed(self, call: LinkedCall) -> None:
        if self._run.running.get(call.agent) is call:
            del self._run.running[call.agent]

    def held_back(self, call: LinkedCall, reason: str) -> None:
        for link in self.waiting_for(call.agent):
            self.listener(
                LinkWaits(
                    agent=link.agent, engine=link.engine.url, upstream=call.agent, reason=reason
                )
            )

    def release(self, link: Link) -> None:
        self.host.start_cleanup(link.delete_stream)

    def end_all(self, reason: str) -> None:
        """End every link: no call will come any more that could use one."""
        self._planning.drop_pending()
        self._links.end_all(reason)
        self._run.end()

    async def _plan(self) -> None:
        await anyio.sleep(DELIVERY_SECONDS)
        changes = self._run.changes
        turns = await self.upcoming(self._run.caller)
        self._links.end_idle({turn.agent for turn in turns} | self.possible())
        await self.link_all(turns, changes)

    async def link_all(self, turns: Sequence[Turn], changes: int) -> None:
        """Have a link for each of these turns, as long as nothing has changed since ``changes``."""
        for turn in turns:
            if changes != self._run.changes:
                return
            await self._link(turn, changes)

    async def _watch_end(self) -> None:
        """Poll whether the run goes on: a team does not tell that it has ended."""
        ended = 0
        # Once more after the end, for those who read what the team has said.
        while ended < 2:
            await anyio.sleep(END_POLL_SECONDS)
            ended = 0 if self.is_running else ended + 1
        self.end_all("unused")
        self.host.start(self.after_run)

    async def _link(self, turn: Turn, changes: int) -> None:
        """Have a link for a turn that may come, made from what was known at ``changes``."""
        agent, attempts = turn.agent, self._run.attempts
        if attempts.get(agent) is Attempt.PLAIN_ENGINE:
            return
        forecast: Forecast | None = None
        try:
            if self._links.fits(turn):
                return
            # Until there is a link; what keeps it from being made from here on is haste.
            attempts.setdefault(agent, Attempt.UNFINISHED)
            if not self._run.is_now(turn):
                return
            forecast = await self.forecast(turn)
            if forecast is None:
                self._run.attempt_ended(agent)
                return
            prompt = await forecast.prompt()
            if attempts.get(agent) is Attempt.DECLINED:
                attempts[agent] = Attempt.UNFINISHED
            if changes != self._run.changes or not self._run.is_now(turn):
                return
            if link := self._links.extend(prompt, forecast):
                self._follow_running(link)
            else:
                await self._open(forecast, prompt, changes)
        except NotForecastable as reason:
            self._decline(agent, str(reason))
        except PluginMissing as problem:
            attempts[agent] = Attempt.PLAIN_ENGINE
            if forecast is not None:
                report_plain_engine(forecast.engine.url, problem)
        except EngineError as error:
            self._run.attempt_ended(agent)
            logger.warning("No link to %s this time: %s", agent, error)
        except Exception as error:
            # The agent's own code: its tools, its context. It must not cost the others theirs.
            self._decline(agent, f"its next prompt could not be told: {error!r}")

    async def _open(self, forecast: Forecast, prompt: Prompt, changes: int) -> None:
        turn, engine = forecast.turn, forecast.engine
        if not turn.sure and not await self._kv_share.has_room(
            engine, prompt, self._links.unsure()
        ):
            self._run.attempt_ended(turn.agent)
            reason = "likelier agents hold the share of the KV pool for links that may go unused"
            self.listener(LinkDeclined(agent=turn.agent, engine=engine.url, reason=reason))
            return
        if changes != self._run.changes or not self._run.is_now(turn):
            return
        link = Link(
            engine,
            prompt,
            agent=turn.agent,
            on_failure=forecast.on_failure,
            namespace=forecast.namespace,
            listener=self.listener,
        )
        self._links.add(link, forecast)
        self._run.attempt_ended(turn.agent)
        self._follow_running(link)
        self.host.start(link.run)

    def _follow_running(self, link: Link) -> None:
        for call in self._run.running.values():
            if link.waits_for(call.agent):
                call.text.follow(link)

    def _decline(self, agent: str, reason: str) -> None:
        """Do without a link to an agent this time; each reason is said once."""
        self._run.attempts[agent] = Attempt.DECLINED
        self._links.end(agent, "unused")
        if (agent, reason) in self._said:
            return
        self._said.add((agent, reason))
        logger.warning("%s runs unlinked: %s", agent, reason)
        self.listener(LinkDeclined(agent=agent, engine="", reason=reason))
