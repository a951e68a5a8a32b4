"""Place requests by cached prefix, FLOPs and saturation (`PrefixAware`). Pure.

After MoE-Prefill, §7, §B.2 and Algorithm 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashmoa.router.cache_tables import BLOCK_TOKENS, Blocks, EngineTables, EngineTraits
from flashmoa.router.saturation import FullLoad

# By default, a request accepts this much additional delay per unit of work that it saves.
PATIENCE = 8.0


@dataclass(slots=True)
class WaitingRequest:
    """A request, by a unique name, that has no engine yet.

    Attributes:
        last_match: the last block that any engine has, when the policy last looked; 0: none has
            any. Requests that have it in common prefer the same engine.
    """

    request: str
    blocks: Blocks
    last_match: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """One request's view of an engine.

    Attributes:
        matched: number of the request's tokens that the engine need not compute.
        cost: work to compute the other tokens.
        delay: work that precedes the request. It includes requests that already wait for the
            engine, and excludes the computation of the matched tokens.
        load: the engine's outstanding work ``W``, and its numbers of requests and cached blocks.
            They decide between equal engines, so that all caches are used.
        saturated: whether the engine has its maximum of uncomputed work.
        is_popular: whether its requests with the matched prefix are more work than the prefix.
    """

    engine: str
    matched: int
    cost: int
    delay: int
    load: tuple[int, int, int]
    saturated: bool
    is_popular: bool = False


def choose_engine(
    candidates: Iterable[EngineCandidate], patience: float = 0.0
) -> EngineCandidate | None:
    """Choose the engine with the least delay plus ``patience`` times the work on it.

    So a match is worth a longer queue while the saved work times ``patience`` exceeds the
    additional delay. Return ``None`` if the request should wait: every engine is saturated, or a
    saturated engine has a longer match that is worth waiting. A popular prefix is worth no
    patience: another engine that computes it again relieves the first one of more work.

    With ``patience`` 0 this is the paper's rule: the longest match among unsaturated engines, and
    among equal matches the least load. When requests queue, that rule scatters every prefix,
    because the first engine with room takes the head of the queue.
    """
    ordered = sorted(candidates, key=lambda one: (-one.matched, one.saturated, one.load))
    free = [candidate for candidate in ordered if not candidate.saturated]
    if not patience:
        return free[0] if free else None
    if any(one.is_popular for one in ordered if one.matched == ordered[0].matched):
        patience = min(patience, 1.0)

    def price(candidate: EngineCandidate) -> float:
        return candidate.delay + patience * candidate.cost

    best = min(free, key=price, default=None)
    is_worth_waiting = best is not None and any(
        one.saturated and one.matched > best.matched and price(one) < price(best) for one in ordered
    )
    return None if is_worth_waiting else best


@dataclass(slots=True)
class _PlacedRequest:
    engine: EngineTables
    blocks: Blocks
    is_computed: bool = False


class PrefixAware:
    """Decides which engine each request is sent to. Requests have unique names.

    A request raises its engine's load by its cost there, and the load falls as the engine computes.
    If ``m`` of its tokens match, the cost is ``c = F(m, P) + F(P, P + S)`` for a prefix ``P`` and a
    suffix ``S`` (Eq. 2). Because work adds up, that is ``F(m, P + S)`` wherever a prefix ends. A
    wrong decision costs time; it never changes an answer.
    """

    def __init__(self, *, patience: float = PATIENCE, block_tokens: int = BLOCK_TOKENS) -> None:
        self._patience = patience
        self._block_tokens = block_tokens
        self.engines: dict[str, EngineTables] = {}
        self._placed: dict[str, _PlacedRequest] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.engines[engine] = EngineTables(traits)

    def change_full_load(self, engine: str, full: FullLoad | None) -> None:
        """Change when an engine is full. An engine that has left stays unknown."""
        if (tables := self.engines.get(engine)) is not None:
            tables.traits = replace(tables.traits, full=full)

    def leave(self, engine: str) -> None:
        """Remove an engine, and forget its cache and its requests."""
        if (tables := self.engines.pop(engine, None)) is not None:
            for request in tables.requests:
                del self._placed[request]

    def matched_tokens(self, engine: str, blocks: Blocks) -> int:
        """Return the number of a prompt's tokens that an engine need not compute."""
        return blocks.cached_tokens(self.engines[engine].blocks.match(blocks.hashes))

    def takes_requests(self) -> bool:
        """Return whether some engine takes any request."""
        return not all(engine.is_saturated for engine in self.engines.values())

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        """Return the engines of the requests that need not wait any longer, by request.

        The queue is in order of arrival. If several requests want a saturated engine, the first one
        gets it, so that no request waits for ever.
        """
        placed: dict[str, str] = {}
        waiting = self._place_until_saturated(queue, placed)
        # An idle engine that takes a request has its prefix from then on, and attracts others.
        while self._place_on_idle_engine(waiting, placed):
            left = [one for one in waiting if one.request not in placed]
            waiting = self._place_until_saturated(left, placed)
        return placed

    def _place_until_saturated(
        self, queue: Sequence[WaitingRequest], placed: dict[str, str]
    ) -> list[WaitingRequest]:
        """Place requests until engines are saturated.

        Return the requests that must wait. Skipped requests are left out: earlier requests want the
        same engine.
        """
        left: list[WaitingRequest] = []
        # The work of the requests that wait, by the engine with the longest match.
        queued: Counter[str] = Counter()
        # The engine with the longest match of the last waiting request, by its last matched block.
        nearest: dict[int, EngineCandidate] = {}
        for waiting in queue if self.takes_requests() else ():
            # Rounds are frequent. So after 256 requests that wait, others with the same match are
            # not compared with each engine, but wait, too. They count as much work as the last one.
            if len(left) >= 256 and (same := nearest.get(self._last_match(waiting))) is not None:
                queued[same.engine] += same.cost
                continue
            candidates = [self._candidate(name, waiting.blocks, queued) for name in self.engines]
            chosen = choose_engine(candidates, self._patience)
            if chosen is None:
                left.append(waiting)
                best = min(candidates, key=lambda one: (-one.matched, one.delay))
                queued[best.engine] += best.cost
                waiting.last_match = None
                nearest[self._last_match(waiting)] = best
                continue
            placed[waiting.request] = chosen.engine
            self.admit(waiting, chosen.engine)
            if not self.takes_requests():
                break
        return left

    def _last_match(self, waiting: WaitingRequest) -> int:
        if waiting.last_match is None:
            hashes, tables = waiting.blocks.hashes, [one.blocks for one in self.engines.values()]
            found = bisect_left(
                hashes, True, key=lambda block: all(block not in one for one in tables)
            )
            waiting.last_match = hashes[found - 1] if found else 0
        return waiting.last_match

    def _place_on_idle_engine(self, queue: list[WaitingRequest], placed: dict[str, str]) -> bool:
        """Place one request that an idle engine would finish sooner, and return whether one was."""
        if all(engine.load.total for engine in self.engines.values()):
            return False
        for waiting in queue:
            candidates = [self._candidate(name, waiting.blocks, {}) for name in self.engines]
            chosen = choose_engine(candidates, patience=1.0)
            if chosen is not None and not self.engines[chosen.engine].load.total:
                placed[waiting.request] = chosen.engine
                self.admit(waiting, chosen.engine)
                return True
        return False

    def _candidate(self, name: str, blocks: Blocks, queued: Mapping[str, int]) -> EngineCandidate:
        engine = self.engines[name]
        table, work = engine.blocks, engine.traits.measure.work
        found = table.match(blocks.hashes)
        matched = blocks.cached_tokens(found)
        committed = blocks.cached_tokens(table.match_committed(blocks.hashes[:found]))
        cost = work(matched, blocks.length)
        siblings = table.promises(blocks.hashes[found - 1]) if found else 0
        waiting = queued.get(name, 0) if engine.is_saturated else 0
        return EngineCandidate(
            engine=name,
            matched=matched,
            cost=cost,
            delay=engine.load.total + waiting - work(committed, matched),
            load=(engine.load.total, len(engine.requests), len(table)),
            saturated=engine.is_saturated,
            is_popular=siblings > 0 and siblings * cost > work(0, matched),
        )

    def admit(self, waiting: WaitingRequest, engine: str) -> None:
        """Record that a request is sent to an engine. :meth:`route` calls this itself."""
        tables, blocks = self.engines[engine], waiting.blocks
        tables.requests.add(waiting.request)
        tables.load.add(waiting.request, self.matched_tokens(engine, blocks), blocks.length)
        tables.blocks.promise(blocks.hashes)
        self._placed[waiting.request] = _PlacedRequest(tables, blocks)

    def finish_prefill(self, request: str) -> bool:
        """Record that a request's prompt is computed. Return whether that is news."""
        placed = self._placed.get(request)
        if placed is None or placed.is_computed:
            return False
        placed.engine.blocks.commit(placed.blocks.hashes)
        self._settle(request, placed)
        return True

    def end(self, request: str) -> None:
        """Forget a request, whether its prompt is computed or not. A repeat changes nothing."""
        if (placed := self._placed.pop(request, None)) is not None:
            placed.engine.requests.discard(request)
            if not placed.is_computed:
                self._settle(request, placed)

    def _settle(self, request: str, placed: _PlacedRequest) -> None:
        """Record that a request has no work left."""
        placed.is_computed = True
        placed.engine.load.finish(request)
        placed.engine.blocks.release(placed.blocks.hashes)

    def add_blocks(self, engine: str, hashes: Sequence[int]) -> None:
        """Record that an engine has cached blocks, and so has computed the pending ones."""
        if (tables := self.engines.get(engine)) is not None:
            fulfilled = tables.blocks.commit(hashes)
            tables.load.subtract_computed(fulfilled * self._block_tokens)

    def remove_blocks(self, engine: str, hashes: Iterable[int] | None = None) -> None:
        """Record that an engine has evicted blocks; by default all."""
        if (tables := self.engines.get(engine)) is not None:
            tables.blocks.evict(hashes)
