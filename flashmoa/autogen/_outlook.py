"""What a team is about to ask: a link to everyone who may speak next, kept up to date."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import anyio

from flashmoa._concurrency import Repeated, TaskHost
from flashmoa.autogen._calls import Request
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._forecast import UNCERTAIN, NotForecastable, forecast
from flashmoa.autogen._held import HeldLinks
from flashmoa.autogen._room import Room
from flashmoa.autogen._roster import Basis, Roster
from flashmoa.autogen._speakers import MANAGER, SUMMARY, Turn
from flashmoa.autogen._turn import RunningTurn
from flashmoa.engine import EngineError, PluginMissing
from flashmoa.linking.failure_policy import FailurePolicy
from flashmoa.linking.link import Ahead, Link, report_plain_engine
from flashmoa.linking.placeholders import StandIns
from flashmoa.linking.prompt import Prompt
from flashmoa.observe import LinkDeclined, Listener

logger = logging.getLogger(__name__)

# What is published reaches everybody within a few rounds of the event loop.
_DELIVERY_SECONDS = 0.002
_LONGEST_DELIVERY = 1.0
_END_POLL_SECONDS = 0.2
# How long a team that has ended is waited for, to run again.
_NEXT_RUN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a team is linked; see :func:`flashmoa.autogen.link`."""

    ahead: Ahead
    on_failure: FailurePolicy | Mapping[str, FailurePolicy] | None
    kv_share: float
    include: Collection[str] = ()

    def policy(self, agent: str, client: FlashMoAChatCompletionClient) -> FailurePolicy:
        """For the link to an agent."""
        given = self.on_failure
        policy = given.get(agent) if isinstance(given, Mapping) else given
        return policy or client.on_failure


class Outlook:
    """The links of one team (an ``Audience`` of its calls).

    Args:
        inner: the outlooks of teams that are members of this one, or whose
            ``SocietyOfMindAgent`` is, by the member's name.
    """

    def __init__(
        self,
        roster: Roster,
        settings: Settings,
        listener: Listener,
        inner: Mapping[str, Outlook],
    ) -> None:
        self.listener = listener
        self.streams = settings.ahead == "text"
        self.host = TaskHost()
        self._roster = roster
        self._settings = settings
        self._inner = inner
        self._links = HeldLinks(roster, streams=self.streams)
        self._running: dict[str, RunningTurn] = {}
        self._speaker = ""
        # To whom the last look could make no link, and what was said of that.
        self._declined: set[str] = set()
        self._said: set[tuple[str, str]] = set()
        # Whose engine has no plugin; it is asked again in the team's next run.
        self._plain: set[str] = set()
        # Whose writers were done before a link to them could be made.
        self._overtaken: set[str] = set()
        self._room = Room(settings.kv_share)
        self._looking = Repeated(self.host, self._look_ahead)
        self._watching = Repeated(self.host, self._watch_end)
        # Counts what makes a look out of date: a call, the end of a run.
        self._changes = 0

    def begin(self, agent: str, request: Request) -> RunningTurn:
        """A call goes out."""
        self._changes += 1
        own, rewritten = self._take(agent), self._roster.rewrites(agent)
        missed = self._looking.is_running or agent in self._overtaken
        early = own is None and missed and agent not in self._declined | self._plain
        self._overtaken.discard(agent)
        turn = RunningTurn(self, agent, request, own, rewritten=rewritten, early=early)
        # Whatever was complete before has been delivered, or somebody is waited for anyway.
        self._running = {n: t for n, t in self._running.items() if not t.complete}
        self._running[agent] = turn
        self._speaker = agent
        # In the background: nothing the user waits for waits for a link.
        self._look()
        return turn

    def _take(self, agent: str) -> Link | None:
        """The link to the prompt of a call that is here."""
        inner = self._inner.get(agent)
        return self._links.take(agent) if inner is None else inner._links.take(SUMMARY)

    def finished(self, turn: RunningTurn) -> None:
        """A turn's message is known; what others write at the same time comes after it."""
        waiting = [name for name, link in self._links.all() if link.waits_for(UNCERTAIN)]
        counts = {name: len(self._roster.received(name)) for name in waiting if name != MANAGER}
        if counts:
            self.host.start(lambda: self._look_when_delivered(turn, counts))

    def failed(self, turn: RunningTurn) -> None:
        """What this turn would have given to others is not known any more."""
        if self._running.get(turn.agent) is turn:
            del self._running[turn.agent]

    def waiting_for(self, agent: str) -> list[Link]:
        return [link for _, link in self._links.all() if link.waits_for(agent)]

    def give_back(self, link: Link) -> None:
        self.host.finish(link.delete_stream)

    def end_all(self, reason: str) -> None:
        """No call will come any more that could use a link."""
        self._changes += 1
        self._looking.withdraw()
        for name, _ in self._links.all():
            self._links.end(name, reason)
        self._running.clear()
        self._overtaken.clear()
        self._plain.clear()

    def _look(self) -> None:
        """Have the links brought up to date, once for all reasons there are by then."""
        if self._settings.ahead == "nothing":
            return
        self._looking.want()
        self._watching.ensure()

    async def _look_ahead(self) -> None:
        await anyio.sleep(_DELIVERY_SECONDS)
        changes = self._changes
        turns = await self._roster.upcoming(self._speaker)
        self._links.end_idle({turn.agent for turn in turns} | self._roster.speaking())
        for turn in turns:
            if changes != self._changes:
                break
            await self._serve(turn, changes)

    async def _watch_end(self) -> None:
        """A team that has ended, by whatever condition, tells nobody."""
        ended = 0
        # Once more after the end, for whoever reads what the team has said.
        while ended < 2:
            await anyio.sleep(_END_POLL_SECONDS)
            ended = 0 if self._roster.is_running else ended + 1
        self.end_all("unused")
        self.host.start(self._await_next_run)

    async def _await_next_run(self) -> None:
        """Have what is known of the next run's first prompts prefilled, in case it comes soon."""
        changes = self._changes
        for turn in await self._roster.starting():
            if changes == self._changes:
                await self._serve(turn, changes)
        with anyio.move_on_after(_NEXT_RUN_SECONDS):
            while changes == self._changes and self._links.are_of_this_run():  # noqa: ASYNC110
                await anyio.sleep(_END_POLL_SECONDS)
        if changes == self._changes:
            self.end_all("unused")

    async def _look_when_delivered(self, turn: RunningTurn, counts: dict[str, int]) -> None:
        """Look again once all who wait have more messages than these."""
        received = self._roster.received
        with anyio.move_on_after(_LONGEST_DELIVERY):
            while not all(len(received(name)) > count for name, count in counts.items()):  # noqa: ASYNC110
                await anyio.sleep(_DELIVERY_SECONDS)
        self.failed(turn)  # It is among the messages, and no longer to be waited for.
        if self._running:
            self._speaker = next(iter(self._running))
            self._look()

    async def _serve(self, turn: Turn, changes: int) -> None:
        """Have a link for a turn that may come, made from what was known at ``changes``."""
        if turn.agent in self._inner or turn.agent in self._plain:
            return
        try:
            if self._links.fits(turn):
                return
            # Until there is a link; whatever keeps it from being made from here on is haste.
            self._overtaken.add(turn.agent)
            if not self._is_now(turn):
                return
            client = self._roster.client(turn.agent)
            stand_ins = StandIns(turn.writers)
            futures = self._roster.futures(turn, stand_ins)
            basis = self._roster.basis(turn, coming=len(futures[0]))
            dry_runs = self._roster.dry_runs(turn.agent)
            prompt = await forecast(client, dry_runs, futures, stand_ins)
            self._declined.discard(turn.agent)
            if changes != self._changes:
                return
            if not self._is_now(turn):
                return
            if link := self._links.go_on(prompt, basis):
                self._replay(link)
            else:
                await self._open(client, prompt, basis, changes)
        except NotForecastable as reason:
            self._decline(turn.agent, str(reason))
        except PluginMissing as problem:
            self._plain.add(turn.agent)
            self._overtaken.discard(turn.agent)
            report_plain_engine(self._roster.client(turn.agent).engine.url, problem)
        except EngineError as error:
            self._overtaken.discard(turn.agent)
            logger.warning("No link to %s this time: %s", turn.agent, error)
        except Exception as error:
            # The agent's own code: its tools, its context. It must not cost the others theirs.
            self._decline(turn.agent, f"its next prompt could not be told: {error!r}")

    def _is_now(self, turn: Turn) -> bool:
        """Whether those who are to be writing still are; else their messages are on the way,
        and the call that follows looks again."""
        now = [self._running.get(name) for name in turn.after[0]] if turn.after else []
        return all(running is None or not running.complete for running in now)

    async def _open(
        self, client: FlashMoAChatCompletionClient, prompt: Prompt, basis: Basis, changes: int
    ) -> None:
        turn, unsure = basis.turn, self._links.unsure()
        if not turn.sure and not await self._room.has(client.engine, prompt, unsure):
            self._overtaken.discard(turn.agent)
            reason = "likelier agents hold the share of the KV pool for links that may be in vain"
            self.listener(LinkDeclined(agent=turn.agent, engine=client.engine.url, reason=reason))
            return
        if changes != self._changes or not self._is_now(turn):
            return
        link = Link(
            client.engine,
            prompt,
            agent=turn.agent,
            on_failure=self._settings.policy(turn.agent, client),
            listener=self.listener,
        )
        self._links.add(link, basis)
        self._overtaken.discard(turn.agent)
        self._replay(link)
        self.host.start(link.run)

    def _replay(self, link: Link) -> None:
        for running in self._running.values() if self.streams else ():
            if link.waits_for(running.agent):
                running.replay(link)

    def _decline(self, agent: str, reason: str) -> None:
        """This time; what is said of it is said once."""
        self._overtaken.discard(agent)
        self._declined.add(agent)
        self._links.end(agent, "unused")
        if (agent, reason) in self._said:
            return
        self._said.add((agent, reason))
        logger.warning("%s runs unlinked: %s", agent, reason)
        self.listener(LinkDeclined(agent=agent, engine="", reason=reason))
