"""Implement the rule of NVIDIA Dynamo's router as a policy of ours (`Dynamo`); pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flashmoa.router.blocks import Blocks
from flashmoa.router.cache_tables import BlockTable, PrefixIndex
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest


@dataclass(slots=True)
class _Worker:
    """What Dynamo's router knows of an engine: its cache, and the requests that it has booked.

    Attributes:
        used: the blocks of those requests, which are pending in this table.
    """

    cache: BlockTable
    used: BlockTable
    prefill_tokens: int = 0


@dataclass(slots=True)
class _Booked:
    """A request on an engine: the tokens that it prefills, its blocks and its prompts to come."""

    engine: str
    tokens: int
    hashes: Sequence[int]
    items_left: int


class Dynamo(Policy):
    """Implements the KV router of NVIDIA Dynamo 1.6, with its defaults.

    Each request goes at once to the engine with the least cost, a random one of several (``lib/
    kv-router/src/scheduling/selector/default.rs`` in github.com/ai-dynamo/dynamo): the blocks that
    it has yet to prefill with this request, less those of the request that it has cached, plus the
    blocks that its requests occupy with this one. Prefills count in full until they are complete.
    Only what engines report is cached: requests on their way do not attract others.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._cached, self._used = PrefixIndex(), PrefixIndex()
        self._workers: dict[str, _Worker] = {}
        self._booked: dict[str, _Booked] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        if engine not in self._workers:
            cache = BlockTable(traits.cache_blocks, self._cached)
            self._workers[engine] = _Worker(cache, BlockTable(index=self._used))

    def leave(self, engine: str) -> None:
        if (worker := self._workers.pop(engine, None)) is not None:
            worker.cache.withdraw()
            worker.used.withdraw()
            self._booked = {name: at for name, at in self._booked.items() if at.engine != engine}

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        placed: dict[str, str] = {}
        for waiting in queue if self._workers else ():
            placed[waiting.request] = engine = self._choose(waiting.blocks)
            self.admit(waiting, engine)
        return placed

    def _choose(self, blocks: Blocks) -> str:
        cached, used = self._cached.match(blocks.hashes), self._used.match(blocks.hashes)
        costs: dict[str, float] = {}
        for name, worker in self._workers.items():
            prefill = (worker.prefill_tokens + blocks.length) / blocks.size
            prefill -= cached.get(worker.cache.engine, 0)
            new = len(blocks.hashes) - used.get(worker.used.engine, 0)
            costs[name] = max(0.0, prefill) + worker.used.pending + new
        least = min(costs.values())
        return self._random.choice([name for name, cost in costs.items() if cost == least])

    def admit(self, waiting: WaitingRequest, engine: str, cached: int | None = None) -> None:
        worker, blocks = self._workers[engine], waiting.blocks
        if cached is None:
            cached = worker.cache.match(blocks.hashes) * blocks.size
        tokens = max(0, blocks.length - cached)
        worker.prefill_tokens += tokens
        worker.used.promise(blocks.hashes)
        self._booked[waiting.request] = _Booked(engine, tokens, blocks.hashes, blocks.items)

    def end(self, request: str) -> None:
        if (booked := self._booked.pop(request, None)) is None:
            return
        worker = self._workers[booked.engine]
        worker.prefill_tokens -= booked.tokens
        worker.used.release(booked.hashes)

    def finish_prefill(self, request: str, items: int | None = None) -> None:
        if (booked := self._booked.get(request)) is None:
            return
        booked.items_left -= booked.items_left if items is None else items
        if booked.items_left <= 0:
            self._workers[booked.engine].prefill_tokens -= booked.tokens
            booked.tokens = 0

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        if (worker := self._workers.get(engine)) is not None:
            worker.cache.commit(tuple(hashes))

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        if (worker := self._workers.get(engine)) is not None:
            worker.cache.evict(hashes)

    def clear_blocks(self, engine: str) -> None:
        if (worker := self._workers.get(engine)) is not None:
            worker.cache.clear()
