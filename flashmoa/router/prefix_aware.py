"""Route by cached prefix, FLOPs and saturation; pure (MoE-Prefill §7, §B.2 and Algorithm 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flashmoa.router.blocks import BLOCK_TOKENS, Blocks
from flashmoa.router.choice import EngineCandidate, choose_engine
from flashmoa.router.engine_record import EngineRecord, PlacedRequest
from flashmoa.router.engine_state import BlockTable
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest
from flashmoa.router.prefix_index import PrefixIndex


class PrefixAware(Policy):
    """Implements the paper's cascade over tables of cached and promised blocks.

    A request raises its engine's load by its cost there, and the load falls as the engine computes.
    If ``m`` of its tokens match, the cost is ``c = F(m, P) + F(P, P + S)`` for a prefix ``P`` and a
    suffix ``S`` (Eq. 2). Because work adds up, that is ``F(m, P + S)`` wherever a prefix ends. A
    wrong decision costs time; it never makes an answer wrong.

    Args:
        patience: how much delay a request accepts for work that is saved, see
            :func:`~flashmoa.router.choice.choose_engine`; 0 is the paper's rule.
        window: how many waiting requests are considered in each round: half of them at the head
            of the queue, the others anywhere in it, in turns. Later ones may overtake earlier ones.
        ageing: after how many placements of others a request that is held for its prefix has half
            the patience left; after twice as many, a third, and so on.
        short: a request with at most so many tokens of its own after a prefix does not wait for the
            engine that has, or will compute, the prefix: it is little more work there, and in the
            engine's queue it shares what else it has in common with others.
        block_tokens: number of tokens in a block of the prompts'
            :class:`~flashmoa.router.blocks.Blocks`.
    """

    def __init__(
        self,
        *,
        patience: float = 8.0,
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
        self._engines: dict[str, EngineRecord] = {}
        self._placed: dict[str, PlacedRequest] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        if (state := self._engines.get(engine)) is None:
            table = BlockTable(traits.cache_blocks, self._index)
            self._engines[engine] = EngineRecord(traits, table)
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

    def backlog(self, engine: str) -> int:
        """Return the load with what the engine is computing, which balances engines."""
        return self._engines[engine].backlog

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
        if all(engine.load.total for engine in self._engines.values()):
            return False
        for waiting in held:
            chosen = choose_engine(self._candidates(waiting.blocks, {}), patience=1.0)
            if chosen is not None and not self._engines[chosen.engine].load.total:
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
            (engine.backlog, len(engine.requests), len(engine.table), name)
            for name, engine in self._engines.items()
            if engine.table.engine not in found and not engine.is_saturated
        ]
        least = min(strangers, key=lambda stranger: stranger[:3])[3] if strangers else None
        return [
            self._candidate(name, blocks, found.get(engine.table.engine, 0), queued)
            for name, engine in self._engines.items()
            if engine.table.engine in found or name == least
        ]

    def _candidate(
        self, name: str, blocks: Blocks, found: int, queued: Mapping[str, int]
    ) -> EngineCandidate:
        """Return an engine that has the first ``found`` blocks of a prompt, or will have them."""
        engine = self._engines[name]
        table, work = engine.table, engine.traits.measure.work
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
        if waiting.request in self._placed:
            raise ValueError(f"request {waiting.request!r} has an engine already; end it first")
        self._placements += 1
        self._held_since.pop(waiting.request, None)
        state, blocks = self._engines[engine], waiting.blocks
        start = self.matched_tokens(engine, blocks) if cached is None else cached
        state.table.promise(blocks.hashes)
        state.add(waiting.request, start, blocks)
        self._placed[waiting.request] = PlacedRequest(state, blocks, start, blocks.items)

    def finish_prefill(self, request: str, items: int | None = None) -> None:
        placed = self._placed.get(request)
        if placed is None or placed.items_left <= 0:
            return
        placed.items_left -= placed.items_left if items is None else items
        blocks, items = placed.blocks, max(0, placed.items_left)
        left = (blocks.length - placed.start) * items // blocks.items
        placed.engine.answer(request, blocks.length - left)
        if not items:
            placed.engine.table.commit(blocks.hashes)
            placed.engine.table.release(blocks.hashes)

    def end(self, request: str) -> None:
        self._held_since.pop(request, None)
        if (placed := self._placed.pop(request, None)) is None:
            return
        placed.engine.end(request, placed.blocks)
        if placed.items_left > 0:
            placed.engine.table.release(placed.blocks.hashes)

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        if (state := self._engines.get(engine)) is not None:
            fulfilled, unknown = state.table.commit(tuple(hashes))
            state.load.subtract_computed(fulfilled * self._block_tokens)
            # Of a list only the beginning is known. Unknown blocks may also be answers, or prompts
            # of other clients, so the load of single prompts does not fall by them.
            state.load.subtract_computed(unknown * self._block_tokens, of_lists=True)

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        if (state := self._engines.get(engine)) is not None:
            state.table.evict(hashes)

    def clear_blocks(self, engine: str) -> None:
        if (state := self._engines.get(engine)) is not None:
            state.table.clear()
