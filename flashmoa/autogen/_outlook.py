"""What a team is about to ask: a link to everyone who may speak next, kept up to date."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import anyio

from flashmoa.autogen._calls import Request
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._forecast import UNCERTAIN, NotForecastable, forecast
from flashmoa.autogen._roster import Roster
from flashmoa.autogen._speakers import MANAGER, SUMMARY, Turn
from flashmoa.autogen._turn import RunningTurn
from flashmoa.engine import EngineError, PluginMissing
from flashmoa.failures import FailurePolicy
from flashmoa.links import Ahead, Link, report_plain_engine
from flashmoa.observe import LinkDeclined, Listener
from flashmoa.prompts import Prompt
from flashmoa.stand_ins import StandIns
from flashmoa.tasks import Repeated, TaskHost

logger = logging.getLogger(__name__)

# What is published reaches everybody within a few rounds of the event loop.
_DELIVERY_SECONDS = 0.002
_LONGEST_DELIVERY = 1.0
_END_POLL_SECONDS = 0.2
_CHARACTERS_PER_TOKEN = 3


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
        societies: the outlooks of teams whose ``SocietyOfMindAgent`` is a member of this one,
            by its name.
    """

    def __init__(
        self,
        roster: Roster,
        settings: Settings,
        listener: Listener,
        societies: Mapping[str, Outlook],
    ) -> None:
        self.listener = listener
        self.streams = settings.ahead == "text"
        self.host = TaskHost()
        self._roster = roster
        self._settings = settings
        self._societies = societies
        self._links: dict[str, Link] = {}
        self._unsure: set[str] = set()
        # What links were made from, as far as it may be another thing at the next look.
        self._bases: dict[str, object] = {}
        self._running: dict[str, RunningTurn] = {}
        self._speaker = ""
        self._declined: set[str] = set()
        # Whose writers were done before a link to them could be made.
        self._overtaken: set[str] = set()
        self._pools: dict[str, int] = {}
        self._looking = Repeated(self.host, self._look_ahead)
        self._watching = Repeated(self.host, self._watch_end)
        # Counts what makes a look out of date: a call, the end of a run.
        self._changes = 0

    def begin(self, agent: str, request: Request) -> RunningTurn:
        """A call goes out."""
        self._changes += 1
        own, rewritten = self._take(agent), self._roster.rewrites(agent)
        missed = self._looking.is_running or agent in self._overtaken
        early = own is None and missed and agent not in self._declined
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
        society = self._societies.get(agent)
        return self._links.pop(agent, None) if society is None else society._take(SUMMARY)

    def finished(self, turn: RunningTurn) -> None:
        """A turn's message is known; what others write at the same time comes after it."""
        waiting = [name for name, link in self._links.items() if link.waits_for(UNCERTAIN)]
        counts = {name: len(self._roster.received(name)) for name in waiting if name != MANAGER}
        if counts:
            self.host.start(lambda: self._look_when_delivered(turn, counts))

    def failed(self, turn: RunningTurn) -> None:
        """What this turn would have given to others is not known any more."""
        if self._running.get(turn.agent) is turn:
            del self._running[turn.agent]

    def waiting_for(self, agent: str) -> list[Link]:
        return [link for link in self._links.values() if link.waits_for(agent)]

    def give_back(self, link: Link) -> None:
        self.host.finish(link.delete_stream)

    def end_all(self, reason: str) -> None:
        """No call will come any more that could use a link."""
        self._changes += 1
        self._looking.withdraw()
        for link in self._links.values():
            link.end(reason)
        self._links.clear()
        self._running.clear()

    def _look(self) -> None:
        """Have the links brought up to date, once for all reasons there are by then."""
        if self._settings.ahead == "nothing":
            return
        self._looking.want()
        self._watching.ensure()

    async def _look_ahead(self) -> None:
        await anyio.sleep(_DELIVERY_SECONDS)
        changes = self._changes
        for turn in await self._roster.upcoming(self._speaker):
            if changes != self._changes:
                break
            if turn.agent not in self._declined and turn.agent not in self._societies:
                await self._serve(turn, changes)

    async def _watch_end(self) -> None:
        """A team that has ended, by whatever condition, tells nobody."""
        ended = 0
        # Once more after the end, for whoever reads what the team has said.
        while ended < 2:
            await anyio.sleep(_END_POLL_SECONDS)
            ended = 0 if self._roster.is_running else ended + 1
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
        try:
            basis = (turn, len(self._roster.received(turn.agent)))
            if self._fits(turn, basis):
                return
            # Until there is a link; whatever keeps it from being made from here on is haste.
            self._overtaken.add(turn.agent)
            if not self._is_now(turn):
                return
            client = self._roster.client(turn.agent)
            prompt = await self._forecast(turn, client)
            if changes != self._changes:
                return
            self._bases[turn.agent] = basis
            if self._is_now(turn) and not self._goes_on(turn, prompt):
                await self._open(turn, client, prompt, changes)
        except NotForecastable as reason:
            self._decline(turn.agent, str(reason))
        except PluginMissing as problem:
            self._declined.add(turn.agent)
            report_plain_engine(self._roster.client(turn.agent).engine.url, problem)
        except EngineError as error:
            self._overtaken.discard(turn.agent)
            logger.warning("No link to %s this time: %s", turn.agent, error)
        except Exception as error:
            # The agent's own code: its tools, its context. It must not cost the others theirs.
            self._decline(turn.agent, f"its next prompt could not be told: {error!r}")

    def _fits(self, turn: Turn, basis: object) -> bool:
        """Whether there is a link that needs nothing new."""
        link = self._links.get(turn.agent)
        if link is None or (link.is_over and self.streams):
            return False
        waits = {slot.name for slot in link.prompt.slots if slot.is_open}
        if not self.streams:
            return True
        if UNCERTAIN in waits or turn.handoff:
            return self._bases.get(turn.agent) == basis
        return waits == set(turn.writers)

    def _is_now(self, turn: Turn) -> bool:
        """Whether those who are to be writing still are; else their messages are on the way,
        and the call that follows looks again."""
        now = [self._running.get(name) for name in turn.after[0]] if turn.after else []
        return all(running is None or not running.complete for running in now)

    async def _forecast(self, turn: Turn, client: FlashMoAChatCompletionClient) -> Prompt:
        stand_ins = StandIns(turn.writers)
        futures = self._roster.futures(turn, stand_ins)
        return await forecast(client, self._roster.dry_runs(turn.agent), futures, stand_ins)

    def _goes_on(self, turn: Turn, prompt: Prompt) -> bool:
        """Let the link there is go on with what is certain now."""
        link = self._links.get(turn.agent)
        if link is None or link.is_over:
            return False
        if link.become(prompt):
            self._replay(link)
            return True
        link.end("mispredicted")
        return False

    async def _open(
        self, turn: Turn, client: FlashMoAChatCompletionClient, prompt: Prompt, changes: int
    ) -> None:
        if not turn.sure and not await self._has_room(client, prompt):
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
        self._links[turn.agent] = link
        self._overtaken.discard(turn.agent)
        (self._unsure.discard if turn.sure else self._unsure.add)(turn.agent)
        self._replay(link)
        self.host.start(link.run)

    def _replay(self, link: Link) -> None:
        for running in self._running.values() if self.streams else ():
            if link.waits_for(running.agent):
                running.replay(link)

    async def _has_room(self, client: FlashMoAChatCompletionClient, prompt: Prompt) -> bool:
        """Whether links that may be in vain leave the rest of the KV pool to others."""
        url = client.engine.url
        if url not in self._pools:
            self._pools[url] = sum(rank.total for rank in (await client.engine.info()).kv)
        others = [link for name, link in self._links.items() if name in self._unsure]
        prompts = [link.prompt for link in others if link.engine.url == url and not link.is_over]
        characters = sum(len(one.stable()) for one in [*prompts, prompt])
        return characters <= _CHARACTERS_PER_TOKEN * self._settings.kv_share * self._pools[url]

    def _decline(self, agent: str, reason: str) -> None:
        self._overtaken.discard(agent)
        self._declined.add(agent)
        logger.warning("%s runs unlinked: %s", agent, reason)
        self.listener(LinkDeclined(agent=agent, engine="", reason=reason))
