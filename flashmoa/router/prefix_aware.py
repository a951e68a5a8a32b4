"""Prefix-, FLOPs- and saturation-aware routing; pure (MoE-Prefill §7, §B.2 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from flashmoa.router.blocks import BLOCK_TOKENS, Blocks
from flashmoa.router.engine_state import BlockTable, PrefillLoad
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """An engine as one request sees it.

    Attributes:
        matched: tokens of the request that it need not compute.
        cost: of the rest of the request there.
        load: its outstanding work ``W``; ``promised``: the part of it that computes the matched
            tokens.
        saturated: whether ``load`` has reached the engine's threshold.
        running: its requests; decides between engines that are otherwise alike.
    """

    engine: str
    matched: int
    cost: int
    load: int
    saturated: bool
    running: int = 0
    promised: int = 0

    @property
    def delay(self) -> int:
        """Return the work before the request that is not done for the request as well."""
        return self.load - self.promised


def choose_engine(
    candidates: Iterable[EngineCandidate], patience: float = 0.0
) -> EngineCandidate | None:
    """Choose, among engines that are not saturated, the longest match, else the least load.

    ``None`` means that the request waits: either every engine is saturated, or a saturated one is
    worth waiting for, because the work saved there, times ``patience``, is more than the work
    before the request, not counting what computes the request's own prefix.

    With ``patience`` 0 this is the paper's rule: a popular prefix spills over as soon as its engine
    is saturated. With a queue, that scatters every prefix, because the first engine with room takes
    the head of the queue. Work that is done twice delays every request behind it, not only one, so
    a patience of several pays.
    """
    ordered = sorted(
        candidates, key=lambda one: (-one.matched, one.saturated, one.load, one.running)
    )
    best = next((one for one in ordered if not one.saturated), None)
    if best is None:
        return None
    for one in ordered[: ordered.index(best)]:
        if patience and patience * (best.cost - one.cost) > one.delay - best.load:
            return None
    return best


@dataclass(slots=True)
class _EngineState:
    traits: EngineTraits
    table: BlockTable
    load: PrefillLoad
    requests: set[str] = field(default_factory=set[str])

    @property
    def saturated(self) -> bool:
        limit = self.traits.saturation
        return limit is not None and self.load.total >= limit


@dataclass(slots=True)
class _Routed:
    engine: _EngineState
    blocks: Blocks
    computed: bool = False


class PrefixAware(Policy):
    """The paper's cascade over shadow tables.

    A request raises its engine's load by what it costs there, and the load falls as the engine
    computes. With ``m`` of its tokens matched, ``c = F(m, P) + F(P, P + S)`` for a prefix ``P`` and
    a suffix ``S`` (Eq. 2); because work adds up, that is ``F(m, P + S)`` wherever a prefix ends.
    A wrong decision costs time, never a wrong answer.

    Args:
        patience: how much delay a request accepts for work that is saved, see
            :func:`choose_engine`; with 0, as in the paper, none.
        window: how many requests of the queue a round looks at; waiting requests can be overtaken.
        block_tokens: tokens in a block of the prompts' :class:`~flashmoa.router.blocks.Blocks`.
    """

    def __init__(
        self, *, patience: float = 8.0, window: int = 256, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._patience = patience
        self._window = window
        self._block_tokens = block_tokens
        self._engines: dict[str, _EngineState] = {}
        self._routed: dict[str, _Routed] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        if (known := self._engines.get(engine)) is None:
            table, load = BlockTable(traits.cache_blocks), PrefillLoad(traits.measure)
            self._engines[engine] = _EngineState(traits, table, load)
        elif known.traits.measure != traits.measure:
            raise ValueError(
                f"engine {engine!r} is measured otherwise already; have it leave before it joins"
            )
        else:
            known.traits = traits
            known.table.capacity = traits.cache_blocks

    def leave(self, engine: str) -> None:
        if (gone := self._engines.pop(engine, None)) is not None:
            for request in gone.requests:
                del self._routed[request]

    def load(self, engine: str) -> int:
        """Return ``W`` of an engine, in its measure."""
        return self._engines[engine].load.total

    def matched(self, engine: str, blocks: Blocks) -> int:
        """Return the number of a prompt's tokens that an engine need not compute."""
        return blocks.tokens(self._engines[engine].table.match(blocks.hashes))

    def cached_blocks(self, engine: str) -> int:
        return len(self._engines[engine].table)

    def is_saturated(self, engine: str) -> bool:
        return self._engines[engine].saturated

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        placed: dict[str, str] = {}
        held = self._fill(queue[: self._window], placed)
        # A prefix that an idle engine takes draws other requests there.
        while self._relieve(held, placed):
            held = self._fill([one for one in held if one.request not in placed], placed)
        return placed

    def _fill(
        self, queue: Sequence[WaitingRequest], placed: dict[str, str]
    ) -> list[WaitingRequest]:
        """Place requests until every engine is saturated; return those that are left."""
        held: list[WaitingRequest] = []
        for place, one in enumerate(queue):
            if all(engine.saturated for engine in self._engines.values()):
                return [*held, *queue[place:]]
            if (chosen := choose_engine(self._seen(one), self._patience)) is None:
                held.append(one)
            else:
                placed[one.request] = chosen.engine
                self.admit(one, chosen.engine)
        return held

    def _relieve(self, held: Sequence[WaitingRequest], placed: dict[str, str]) -> bool:
        """Place one held request that an idle engine would finish sooner; return whether it did."""
        if all(engine.load.total for engine in self._engines.values()):
            return False
        for one in held:
            chosen = choose_engine(self._seen(one), patience=1.0)
            if chosen is not None and chosen.load == 0:
                placed[one.request] = chosen.engine
                self.admit(one, chosen.engine)
                return True
        return False

    def _seen(self, one: WaitingRequest) -> list[EngineCandidate]:
        return [self._candidate(name, engine, one.blocks) for name, engine in self._engines.items()]

    def _candidate(self, name: str, engine: _EngineState, blocks: Blocks) -> EngineCandidate:
        table, work = engine.table, engine.traits.measure.work
        found = table.match(blocks.hashes)
        matched = blocks.tokens(found)
        computed = blocks.tokens(found - table.promised(blocks.hashes[:found]))
        return EngineCandidate(
            engine=name,
            matched=matched,
            cost=work(matched, blocks.length),
            load=engine.load.total,
            saturated=engine.saturated,
            running=len(engine.requests),
            promised=work(computed, matched),
        )

    def admit(self, one: WaitingRequest, engine: str, cached: int | None = None) -> None:
        if one.request in self._routed:
            raise ValueError(f"request {one.request!r} has an engine already; end it first")
        taking = self._engines[engine]
        start = self.matched(engine, one.blocks) if cached is None else cached
        taking.table.promise(one.blocks.hashes)
        taking.load.add(one.request, start, one.blocks.length)
        taking.requests.add(one.request)
        self._routed[one.request] = _Routed(taking, one.blocks)

    def computed(self, request: str) -> None:
        routed = self._routed.get(request)
        if routed is None or routed.computed:
            return
        routed.computed = True
        routed.engine.load.end(request)
        routed.engine.table.commit(routed.blocks.hashes)
        routed.engine.table.release(routed.blocks.hashes)

    def end(self, request: str) -> None:
        routed = self._routed.pop(request, None)
        if routed is None:
            return
        routed.engine.requests.discard(request)
        routed.engine.load.end(request)
        if not routed.computed:
            routed.engine.table.release(routed.blocks.hashes)

    def stored(self, engine: str, hashes: Collection[int]) -> None:
        if (known := self._engines.get(engine)) is not None:
            known.load.executed(known.table.commit(tuple(hashes)) * self._block_tokens)

    def removed(self, engine: str, hashes: Collection[int]) -> None:
        if (known := self._engines.get(engine)) is not None:
            known.table.evict(hashes)

    def cleared(self, engine: str) -> None:
        if (known := self._engines.get(engine)) is not None:
            known.table.clear()
