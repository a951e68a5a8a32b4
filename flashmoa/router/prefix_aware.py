"""Prefix-, FLOPs- and saturation-aware routing; pure (MoE-Prefill §7, §B.2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flashmoa.router.blocks import BLOCK_TOKENS, Blocks
from flashmoa.router.cascade import Candidate, choose
from flashmoa.router.loads import Load
from flashmoa.router.policies import EngineTraits, Waiting
from flashmoa.router.tables import BlockTable


@dataclass(slots=True)
class _Engine:
    traits: EngineTraits
    table: BlockTable
    load: Load
    requests: set[str] = field(default_factory=set[str])

    @property
    def saturated(self) -> bool:
        limit = self.traits.saturation
        return limit is not None and self.load.total >= limit


@dataclass(slots=True)
class _Routed:
    engine: _Engine
    blocks: Blocks
    computed: bool = False


class PrefixAware:
    """A :class:`~flashmoa.router.policies.Policy`: the paper's cascade over shadow tables.

    A request raises its engine's load by what it costs there, and the load falls as the engine
    computes. With ``m`` of its tokens matched, ``c = F(m, P) + F(P, P + S)`` for a prefix ``P`` and
    a suffix ``S`` (Eq. 2); as work adds up, that is ``F(m, P + S)`` wherever a prefix ends.
    Nothing here is needed for a right answer.

    Args:
        patience: how much delay a request takes for work that is saved, see :func:`choose`; with
            0, as in the paper, none.
        window: requests of the queue that a round looks at: those who wait can be overtaken.
        block_tokens: of a block, as the prompts' :class:`~flashmoa.router.blocks.Blocks` have them.
    """

    def __init__(
        self, *, patience: float = 8.0, window: int = 256, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._patience = patience
        self._window = window
        self._block_tokens = block_tokens
        self._engines: dict[str, _Engine] = {}
        self._routed: dict[str, _Routed] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        if (known := self._engines.get(engine)) is None:
            table, load = BlockTable(traits.cache_blocks), Load(traits.measure)
            self._engines[engine] = _Engine(traits, table, load)
        elif known.traits.measure != traits.measure:
            raise ValueError(
                f"engine {engine!r} has to leave before its work is measured otherwise"
            )
        else:
            known.traits = traits
            known.table.capacity = traits.cache_blocks

    def leave(self, engine: str) -> None:
        if (gone := self._engines.pop(engine, None)) is not None:
            for request in gone.requests:
                del self._routed[request]

    def load(self, engine: str) -> int:
        """``W`` of an engine, in its measure."""
        return self._engines[engine].load.total

    def matched(self, engine: str, blocks: Blocks) -> int:
        """Tokens of a prompt that an engine need not compute."""
        return blocks.tokens(self._engines[engine].table.match(blocks.hashes))

    def cached_blocks(self, engine: str) -> int:
        return len(self._engines[engine].table)

    def is_saturated(self, engine: str) -> bool:
        return self._engines[engine].saturated

    def route(self, queue: Sequence[Waiting]) -> dict[str, str]:
        placed: dict[str, str] = {}
        held = self._fill(queue[: self._window], placed)
        # A prefix that an idle engine takes draws others there.
        while self._relieve(held, placed):
            held = self._fill([one for one in held if one.request not in placed], placed)
        return placed

    def _fill(self, queue: Sequence[Waiting], placed: dict[str, str]) -> list[Waiting]:
        """Engines take requests until they are saturated; those that are left."""
        held: list[Waiting] = []
        for place, one in enumerate(queue):
            if all(engine.saturated for engine in self._engines.values()):
                return [*held, *queue[place:]]
            if (chosen := choose(self._seen(one), self._patience)) is None:
                held.append(one)
            else:
                placed[one.request] = chosen.engine
                self.admit(one, chosen.engine)
        return held

    def _relieve(self, held: Sequence[Waiting], placed: dict[str, str]) -> bool:
        """Whether an idle engine takes a request that would otherwise be done later."""
        if all(engine.load.total for engine in self._engines.values()):
            return False
        for one in held:
            chosen = choose(self._seen(one), patience=1.0)
            if chosen is not None and chosen.load == 0:
                placed[one.request] = chosen.engine
                self.admit(one, chosen.engine)
                return True
        return False

    def _seen(self, one: Waiting) -> list[Candidate]:
        return [self._candidate(name, engine, one.blocks) for name, engine in self._engines.items()]

    def _candidate(self, name: str, engine: _Engine, blocks: Blocks) -> Candidate:
        table, work = engine.table, engine.traits.measure.work
        found = table.match(blocks.hashes)
        matched = blocks.tokens(found)
        computed = blocks.tokens(found - table.promised(blocks.hashes[:found]))
        return Candidate(
            engine=name,
            matched=matched,
            cost=work(matched, blocks.length),
            load=engine.load.total,
            saturated=engine.saturated,
            running=len(engine.requests),
            promised=work(computed, matched),
        )

    def admit(self, one: Waiting, engine: str, cached: int | None = None) -> None:
        if one.request in self._routed:
            raise ValueError(f"request {one.request!r} is routed already")
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
