"""Route by cached prefix, FLOPs and saturation (`PrefixAware`); pure.

After MoE-Prefill, §7, §B.2 and Algorithm 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashmoa.router.cache_tables import (
    BLOCK_TOKENS,
    Blocks,
    EngineTables,
    EngineTraits,
    PrefixIndex,
)

# How much delay a request accepts for work that is saved, by default.
PATIENCE = 8.0


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has no engine yet. ``request`` is a unique name for it."""

    request: str
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """Describes an engine from the point of view of one request.

    Attributes:
        engine: the engine's name.
        matched: number of the request's tokens that the engine need not compute.
        cost: work to compute the rest of the request on the engine.
        load: the engine's outstanding work ``W``, with what it is computing.
        saturated: whether the engine has as many tokens to compute as it should have at most.
        running: number of requests on the engine; decides between engines that are otherwise equal.
        prefix_load: the part of ``load`` that computes the matched tokens.
        queued: work of the requests that wait for the engine already.
        is_popular: whether its requests with the matched prefix are more work than the prefix.
        takes_sibling: whether the request need not wait for it although it is saturated.
    """

    engine: str
    matched: int
    cost: int
    load: int
    saturated: bool
    running: int = 0
    prefix_load: int = 0
    queued: int = 0
    is_popular: bool = False
    takes_sibling: bool = False

    @property
    def delay(self) -> int:
        """Return the work that precedes the request and does not compute its prefix."""
        return self.load + self.queued - self.prefix_load


def choose_engine(
    candidates: Iterable[EngineCandidate], patience: float = 0.0
) -> EngineCandidate | None:
    """Choose the engine with the least delay plus ``patience`` times the work on it.

    So a match is worth a longer queue as long as the work that it saves, times ``patience``, is
    more than the additional delay. Return ``None`` if the request should wait: either every engine
    is saturated, or a saturated one has a longer match that is worth it. A saturated engine that
    takes siblings is chosen instead. Of equal engines, the one with the longest match is chosen,
    then the one with the least load.

    A popular prefix is worth no patience: another engine that computes it once more relieves the
    first one of more work than that. So such a request goes where it is finished first.

    With ``patience`` 0 this is the paper's rule: the longest match of those that are not saturated,
    and of equal matches the least load. If requests queue, that scatters every prefix, because the
    first engine with room takes the head of the queue, and computing a prefix twice delays every
    later request; so a patience greater than 1 pays. If all prompts begin with a few equal tokens,
    that rule sends them to the engines that have these, and others get nothing.
    """
    ordered = sorted(candidates, key=lambda c: (-c.matched, c.saturated, c.load, c.running))
    free = [candidate for candidate in ordered if not candidate.saturated]
    if not patience:
        return free[0] if free else None
    if any(one.is_popular for one in ordered if one.matched == ordered[0].matched):
        patience = min(patience, 1.0)

    def price(candidate: EngineCandidate) -> float:
        return candidate.delay + patience * candidate.cost

    best = min(free, key=price, default=None)
    worth = [
        one
        for one in ordered
        if one.saturated
        and (best is None or (one.matched > best.matched and price(one) < price(best)))
    ]
    if not worth:
        return best
    nearest = min(worth, key=price)
    return nearest if nearest.takes_sibling else None


@dataclass(slots=True)
class _PlacedRequest:
    engine: EngineTables
    blocks: Blocks
    is_computed: bool = False


class PrefixAware:
    """Decides to which engine each request is sent; requests are identified by unique names.

    It is the paper's cascade over tables of cached and promised blocks.

    A request raises its engine's load by its cost there, and the load falls as the engine computes.
    If ``m`` of its tokens match, the cost is ``c = F(m, P) + F(P, P + S)`` for a prefix ``P`` and a
    suffix ``S`` (Eq. 2). Because work adds up, that is ``F(m, P + S)`` wherever a prefix ends. A
    wrong decision costs time; it never makes an answer wrong.

    Args:
        patience: how much delay a request accepts for work that is saved, see
            :func:`choose_engine`; 0 is the paper's rule.
        window: how many waiting requests are considered in each round, so that a long queue does
            not take the router's time: half of them at the head of the queue, the others anywhere
            in it, in turns. Later ones may overtake earlier ones.
        ageing: after how many placements of others a request that is held for its prefix has half
            the patience left; after twice as many, a third, and so on. Without it, short siblings
            that keep an engine full could hold a request for ever.
        short: a request with at most so many tokens of its own after a prefix does not wait for the
            engine that has, or will compute, the prefix: it is little more work there, and in the
            engine's queue it shares what else it has in common with others.
        block_tokens: number of tokens in a block of the prompts'
            :class:`~flashmoa.router.cache_tables.Blocks`.
    """

    def __init__(
        self,
        *,
        patience: float = PATIENCE,
        window: int = 256,
        ageing: int = 1000,
        short: int = 128,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._patience = patience
        self._window = window
        self._ageing = ageing
        self._short = short
        self._index = PrefixIndex()
        # The first request after the head of the queue that the next round considers.
        self._turn = 0
        # The number of placements so far, and what it was when each held request was held first.
        self._placements = 0
        self._held_since: dict[str, int] = {}
        self._block_tokens = block_tokens
        self.engines: dict[str, EngineTables] = {}
        self._placed: dict[str, _PlacedRequest] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        """Add an engine that has not joined, or has left."""
        self.engines[engine] = EngineTables(traits, self._index)

    def leave(self, engine: str) -> None:
        """Remove an engine, and forget its cache and its requests."""
        if (tables := self.engines.pop(engine, None)) is not None:
            tables.blocks.withdraw()
            for request in tables.requests:
                del self._placed[request]

    def matched_tokens(self, engine: str, blocks: Blocks) -> int:
        """Return the number of a prompt's tokens that an engine need not compute."""
        return blocks.cached_tokens(self.engines[engine].blocks.match(blocks.hashes))

    def takes_requests(self) -> bool:
        """Return whether some engine takes any request.

        If none does, only a request that has just come may find an engine (:meth:`route`).
        """
        return not all(engine.is_saturated for engine in self.engines.values())

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        """Return engines by request, for those requests in the queue that need not wait any longer.

        Args:
            queue: waiting requests in order of arrival.
        """
        placed: dict[str, str] = {}
        held = self._place_until_saturated(self._considered(queue), placed)
        # An idle engine that takes a request has its prefix from then on, and attracts others.
        while self._place_on_idle_engine(held, placed):
            left = [waiting for waiting in held if waiting.request not in placed]
            held = self._place_until_saturated(left, placed)
        return placed

    def _considered(self, queue: Sequence[WaitingRequest]) -> Sequence[WaitingRequest]:
        if len(queue) <= self._window:
            return queue
        half = self._window // 2
        start = half + self._turn % (len(queue) - half)
        self._turn += half
        return [*queue[:half], *queue[start : start + half]]

    def _place_until_saturated(
        self, queue: Sequence[WaitingRequest], placed: dict[str, str]
    ) -> list[WaitingRequest]:
        """Place requests until engines are saturated. Return those that must wait."""
        held: list[WaitingRequest] = []
        # The work of those that wait, by the engine that has most of their prompts.
        queued: Counter[str] = Counter()
        for waiting in queue:
            candidates = self._candidates(waiting.blocks, queued)
            chosen = choose_engine(candidates, self._patience_of(waiting.request))
            if chosen is None:
                held.append(waiting)
                if candidates:
                    nearest = min(candidates, key=lambda one: (-one.matched, one.delay))
                    queued[nearest.engine] += nearest.cost
                if self.takes_requests():
                    self._held_since.setdefault(waiting.request, self._placements)
            else:
                placed[waiting.request] = chosen.engine
                self.admit(waiting, chosen.engine)
        return held

    def _place_on_idle_engine(self, held: Sequence[WaitingRequest], placed: dict[str, str]) -> bool:
        """Place one held request that an idle engine would finish sooner. Return whether it did."""
        if all(engine.load.total for engine in self.engines.values()):
            return False
        for waiting in held:
            chosen = choose_engine(self._candidates(waiting.blocks, {}), patience=1.0)
            if chosen is not None and not self.engines[chosen.engine].load.total:
                placed[waiting.request] = chosen.engine
                self.admit(waiting, chosen.engine)
                return True
        return False

    def _patience_of(self, request: str) -> float:
        overtaken = self._placements - self._held_since.get(request, self._placements)
        return self._patience / (1 + overtaken / self._ageing)

    def _candidates(self, blocks: Blocks, queued: Mapping[str, int]) -> list[EngineCandidate]:
        """Return the engines between which the choice is: of those without a match, only one."""
        found = self._index.match(blocks.hashes)
        strangers = [
            # Between idle engines, the emptier cache decides, so that all caches are used.
            (engine.backlog, len(engine.requests), len(engine.blocks), name)
            for name, engine in self.engines.items()
            if engine.blocks.engine not in found and not engine.is_saturated
        ]
        least = min(strangers, key=lambda stranger: stranger[:3])[3] if strangers else None
        return [
            self._candidate(name, blocks, found.get(engine.blocks.engine, 0), queued)
            for name, engine in self.engines.items()
            if engine.blocks.engine in found or name == least
        ]

    def _candidate(
        self, name: str, blocks: Blocks, found: int, queued: Mapping[str, int]
    ) -> EngineCandidate:
        """Return an engine that has the first ``found`` blocks of a prompt, or will have them."""
        engine = self.engines[name]
        table, work = engine.blocks, engine.traits.measure.work
        matched = blocks.cached_tokens(found)
        committed = table.match_committed(blocks.hashes, found)
        cost = work(matched, blocks.length)
        siblings = table.promises(blocks.hashes[found - 1]) if found else 0
        is_short = found > 0 and blocks.length - matched <= self._short
        return EngineCandidate(
            engine=name,
            matched=matched,
            cost=cost,
            load=engine.backlog,
            saturated=engine.is_saturated,
            running=len(engine.requests),
            prefix_load=work(blocks.cached_tokens(committed), matched),
            queued=queued.get(name, 0) if engine.is_saturated else 0,
            is_popular=siblings > 0 and siblings * cost > work(0, matched),
            takes_sibling=is_short and engine.takes_siblings,
        )

    def admit(self, waiting: WaitingRequest, engine: str, cached: int | None = None) -> None:
        """Record that a request is sent to an engine; :meth:`route` does so for those it places.

        Args:
            cached: number of tokens of its prompt that the engine has cached; by default, those
                that match.
        """
        self._placements += 1
        self._held_since.pop(waiting.request, None)
        tables, blocks = self.engines[engine], waiting.blocks
        start = self.matched_tokens(engine, blocks) if cached is None else cached
        tables.add(waiting.request, start, blocks)
        self._placed[waiting.request] = _PlacedRequest(tables, blocks)

    def finish_prefill(self, request: str) -> bool:
        """Record that a request's prompt is computed. Return whether that was not known before."""
        placed = self._placed.get(request)
        if placed is None or placed.is_computed:
            return False
        placed.is_computed = True
        placed.engine.answer(request, placed.blocks.length)
        placed.engine.blocks.commit(placed.blocks.hashes)
        placed.engine.blocks.release(placed.blocks.hashes)
        return True

    def end(self, request: str) -> None:
        """Forget a request, whether its prompt is computed or not; harmless to repeat."""
        self._held_since.pop(request, None)
        if (placed := self._placed.pop(request, None)) is None:
            return
        placed.engine.requests.discard(request)
        if not placed.is_computed:
            placed.engine.answer(request, placed.blocks.length)  # Nothing of it is left to do.
            placed.engine.blocks.release(placed.blocks.hashes)

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        """Record that an engine has cached blocks, and so has computed those that were pending."""
        if (tables := self.engines.get(engine)) is not None:
            fulfilled = tables.blocks.commit(tuple(hashes))
            tables.load.subtract_computed(fulfilled * self._block_tokens)

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        """Record that an engine has evicted blocks."""
        if (tables := self.engines.get(engine)) is not None:
            tables.blocks.evict(hashes)

    def clear_blocks(self, engine: str) -> None:
        """Record that an engine's cache is empty."""
        if (tables := self.engines.get(engine)) is not None:
            tables.blocks.clear()
