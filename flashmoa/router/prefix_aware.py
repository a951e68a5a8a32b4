"""Route by cached prefix, FLOPs and saturation; pure (MoE-Prefill §7, §B.2 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from flashmoa.router.blocks import BLOCK_TOKENS, Blocks
from flashmoa.router.engine_state import BlockTable, PrefillLoad
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest
from flashmoa.router.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """Describes an engine from the point of view of one request.

    Attributes:
        engine: the engine's name.
        matched: number of the request's tokens that the engine need not compute.
        cost: work to compute the rest of the request on the engine.
        load: the engine's outstanding work ``W``.
        saturated: whether the engine has as many tokens to compute as it should have at most.
        running: number of requests on the engine; decides between engines that are otherwise equal.
        prefix_load: the part of ``load`` that computes the matched tokens.
    """

    engine: str
    matched: int
    cost: int
    load: int
    saturated: bool
    running: int = 0
    prefix_load: int = 0

    @property
    def delay(self) -> int:
        """The work that precedes the request and does not compute its prefix."""
        return self.load - self.prefix_load


def choose_engine(
    candidates: Iterable[EngineCandidate], patience: float = 0.0
) -> EngineCandidate | None:
    """Choose the engine with the longest match, and among equals the one with the least load.

    Saturated engines are not chosen. Return ``None`` if the request should wait: either every
    engine is saturated, or a saturated one is worth waiting for, because the work that it saves,
    times ``patience``, is more than the additional delay there.

    With ``patience`` 0 this is the paper's rule: a popular prefix spills over as soon as its engine
    is saturated. If requests queue, that scatters every prefix, because the first engine with room
    takes the head of the queue. Computing a prefix twice delays not only this request but every
    later one, so a patience greater than 1 pays.
    """
    ordered = sorted(candidates, key=lambda c: (-c.matched, c.saturated, c.load, c.running))
    best = next((candidate for candidate in ordered if not candidate.saturated), None)
    if best is None:
        return None
    for better_match in ordered[: ordered.index(best)]:
        saved = best.cost - better_match.cost
        if patience and patience * saved > better_match.delay - best.load:
            return None
    return best


@dataclass(slots=True)
class _EngineState:
    traits: EngineTraits
    table: BlockTable
    load: PrefillLoad
    requests: set[str] = field(default_factory=set[str])

    @property
    def is_saturated(self) -> bool:
        limit = self.traits.saturation
        return limit is not None and self.load.tokens >= limit


@dataclass(slots=True)
class _PlacedRequest:
    engine: _EngineState
    blocks: Blocks
    is_computed: bool = False


class PrefixAware(Policy):
    """Implements the paper's cascade over tables of cached and promised blocks.

    A request raises its engine's load by its cost there, and the load falls as the engine computes.
    If ``m`` of its tokens match, the cost is ``c = F(m, P) + F(P, P + S)`` for a prefix ``P`` and a
    suffix ``S`` (Eq. 2). Because work adds up, that is ``F(m, P + S)`` wherever a prefix ends. A
    wrong decision costs time; it never makes an answer wrong.

    Args:
        patience: how much delay a request accepts for work that is saved, see
            :func:`choose_engine`; 0 is the paper's rule.
        window: how many waiting requests are considered in each round: half of them at the head
            of the queue, the others anywhere in it, in turns. Later ones may overtake earlier ones.
        ageing: after how many placements of others a request that is held for its prefix has half
            the patience left; after twice as many, a third, and so on.
        block_tokens: number of tokens in a block of the prompts'
            :class:`~flashmoa.router.blocks.Blocks`.
    """

    def __init__(
        self,
        *,
        patience: float = 8.0,
        window: int = 256,
        ageing: int = 1000,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._patience = patience
        self._window = window
        self._ageing = ageing
        self._index = PrefixIndex()
        # The first request after the head of the queue that the next round considers.
        self._turn = 0
        # The number of placements so far, and what it was when each held request was held first.
        self._placements = 0
        self._held_since: dict[str, int] = {}
        self._block_tokens = block_tokens
        self._engines: dict[str, _EngineState] = {}
        self._placed: dict[str, _PlacedRequest] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        if (state := self._engines.get(engine)) is None:
            table = BlockTable(traits.cache_blocks, self._index)
            load = PrefillLoad(traits.measure)
            self._engines[engine] = _EngineState(traits, table, load)
        elif state.traits.measure != traits.measure:
            raise ValueError(
                f"engine {engine!r} has joined with another measure; let it leave before it joins"
            )
        else:
            state.traits = traits
            state.table.capacity = traits.cache_blocks

    def leave(self, engine: str) -> None:
        if (state := self._engines.pop(engine, None)) is not None:
            state.table.withdraw()
            for request in state.requests:
                del self._placed[request]

    def load(self, engine: str) -> int:
        """Return an engine's load ``W``, in its measure."""
        return self._engines[engine].load.total

    def waiting_tokens(self, engine: str) -> int:
        """Return how many tokens an engine has yet to compute."""
        return self._engines[engine].load.tokens

    def matched_tokens(self, engine: str, blocks: Blocks) -> int:
        """Return the number of a prompt's tokens that an engine need not compute."""
        return blocks.cached_tokens(self._engines[engine].table.match(blocks.hashes))

    def cached_blocks(self, engine: str) -> int:
        """Return the number of blocks that an engine has cached."""
        return len(self._engines[engine].table)

    def is_saturated(self, engine: str) -> bool:
        return self._engines[engine].is_saturated

    def takes_requests(self) -> bool:
        return not all(engine.is_saturated for engine in self._engines.values())

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        placed: dict[str, str] = {}
        held = self._place_until_saturated(self._considered(queue), placed)
        # An idle engine that takes a request has its prefix from then on, and attracts others.
        while self._place_on_idle_engine(held, placed):
            left = [waiting for waiting in held if waiting.request not in placed]
            held = self._place_until_saturated(left, placed)
        return placed

    def _considered(self, queue: Sequence[WaitingRequest]) -> Sequence[WaitingRequest]:
        """Return the head of the queue, and a part of the rest, another one in each round."""
        if len(queue) <= self._window:
            return queue
        half = self._window // 2
        start = half + self._turn % (len(queue) - half)
        self._turn += half
        return [*queue[:half], *queue[start : start + half]]

    def _place_until_saturated(
        self, queue: Sequence[WaitingRequest], placed: dict[str, str]
    ) -> list[WaitingRequest]:
        """Place requests until every engine is saturated. Return those that must wait."""
        held: list[WaitingRequest] = []
        for index, waiting in enumerate(queue):
            if not self.takes_requests():
                return [*held, *queue[index:]]
            candidates = self._candidates(waiting.blocks)
            chosen = choose_engine(candidates, self._patience_of(waiting.request))
            if chosen is None:
                held.append(waiting)
                self._held_since.setdefault(waiting.request, self._placements)
            else:
                placed[waiting.request] = chosen.engine
                self.admit(waiting, chosen.engine)
        return held

    def _place_on_idle_engine(self, held: Sequence[WaitingRequest], placed: dict[str, str]) -> bool:
        """Place one held request that an idle engine would finish sooner. Return whether it did."""
        if all(engine.load.total for engine in self._engines.values()):
            return False
        for waiting in held:
            chosen = choose_engine(self._candidates(waiting.blocks), patience=1.0)
            if chosen is not None and chosen.load == 0:
                placed[waiting.request] = chosen.engine
                self.admit(waiting, chosen.engine)
                return True
        return False

    def _patience_of(self, request: str) -> float:
        overtaken = self._placements - self._held_since.get(request, self._placements)
        return self._patience / (1 + overtaken / self._ageing)

    def _candidates(self, blocks: Blocks) -> list[EngineCandidate]:
        """Return the engines between which the choice is: of those without a match, only one."""
        candidates: list[EngineCandidate] = []
        found_by_engine = self._index.match(blocks.hashes)
        strangers = [
            (engine.load.total, len(engine.requests), name)
            for name, engine in self._engines.items()
            if engine.table.engine not in found_by_engine and not engine.is_saturated
        ]
        least = min(strangers, key=lambda stranger: stranger[:2])[2] if strangers else None
        for name, engine in self._engines.items():
            found = found_by_engine.get(engine.table.engine, 0)
            if not found and name != least:
                continue
            table, work = engine.table, engine.traits.measure.work
            committed = table.match_committed(blocks.hashes, found)
            matched = blocks.cached_tokens(found)
            candidate = EngineCandidate(
                engine=name,
                matched=matched,
                cost=work(matched, blocks.length),
                load=engine.load.total,
                saturated=engine.is_saturated,
                running=len(engine.requests),
                prefix_load=work(blocks.cached_tokens(committed), matched),
            )
            candidates.append(candidate)
        return candidates

    def admit(self, waiting: WaitingRequest, engine: str, cached: int | None = None) -> None:
        if waiting.request in self._placed:
            raise ValueError(f"request {waiting.request!r} has an engine already; end it first")
        self._placements += 1
        self._held_since.pop(waiting.request, None)
        state, blocks = self._engines[engine], waiting.blocks
        start = self.matched_tokens(engine, blocks) if cached is None else cached
        state.table.promise(blocks.hashes)
        state.load.add(waiting.request, start, blocks.length)
        state.requests.add(waiting.request)
        self._placed[waiting.request] = _PlacedRequest(state, blocks)

    def finish_prefill(self, request: str) -> None:
        placed = self._placed.get(request)
        if placed is None or placed.is_computed:
            return
        placed.is_computed = True
        placed.engine.load.remove(request)
        placed.engine.table.commit(placed.blocks.hashes)
        placed.engine.table.release(placed.blocks.hashes)

    def end(self, request: str) -> None:
        self._held_since.pop(request, None)
        if (placed := self._placed.pop(request, None)) is None:
            return
        placed.engine.requests.discard(request)
        placed.engine.load.remove(request)
        if not placed.is_computed:
            placed.engine.table.release(placed.blocks.hashes)

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        if (state := self._engines.get(engine)) is not None:
            fulfilled = state.table.commit(tuple(hashes))
            state.load.subtract_computed(fulfilled * self._block_tokens)

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        if (state := self._engines.get(engine)) is not None:
            state.table.evict(hashes)

    def clear_blocks(self, engine: str) -> None:
        if (state := self._engines.get(engine)) is not None:
            state.table.clear()
