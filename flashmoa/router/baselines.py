"""Policies to compare with; pure: random, in turn, and sglang-router's ``cache_aware``."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from flashmoa.router.blocks import Blocks
from flashmoa.router.policies import EngineTraits, Waiting
from flashmoa.router.tables import BlockTable


class _Counting:
    """Counts each engine's requests; every engine takes everything."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self._where: dict[str, str] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.running.setdefault(engine, 0)

    def leave(self, engine: str) -> None:
        self.running.pop(engine, None)
        self._where = {name: at for name, at in self._where.items() if at != engine}

    def route(self, queue: Sequence[Waiting]) -> dict[str, str]:
        placed: dict[str, str] = {}
        for one in queue:
            if usable := list(self.running):
                placed[one.request] = chosen = self._choose(usable, one.blocks)
                self.admit(one, chosen)
        return placed

    def admit(self, one: Waiting, engine: str, cached: int | None = None) -> None:
        self._where[one.request] = engine
        self.running[engine] += 1

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        raise NotImplementedError

    def end(self, request: str) -> None:
        if (engine := self._where.pop(request, None)) is not None:
            self.running[engine] -= 1

    def computed(self, request: str) -> None:
        pass

    def stored(self, engine: str, hashes: Collection[int]) -> None:
        pass

    def removed(self, engine: str, hashes: Collection[int]) -> None:
        pass

    def cleared(self, engine: str) -> None:
        pass


class Random(_Counting):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._dice = random.Random(seed)

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        return self._dice.choice(usable)


class RoundRobin(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._turn = -1

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        self._turn += 1
        return usable[self._turn % len(usable)]


class CacheAware(_Counting):
    """The algorithm of sglang-router 0.3's ``cache_aware``, with its defaults.

    Where requests are spread unevenly, by both thresholds, the engine with the fewest; else the one
    that was sent the longest prefix, if that is more than ``cache_threshold`` of the prompt; else
    the one with the fewest requests, at random among equals. It keeps a tree of what each engine
    was sent, here in blocks and not in characters, and hears nothing of the engines' caches.

    Args:
        tree_blocks: of each engine's tree, at most.
    """

    def __init__(
        self,
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        tree_blocks: int = 1 << 20,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._dice = random.Random(seed)
        self._threshold = cache_threshold
        self._absolute = balance_abs_threshold
        self._relative = balance_rel_threshold
        self._tree_blocks = tree_blocks
        self._trees: dict[str, BlockTable] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        super().join(engine, traits)
        self._trees.setdefault(engine, BlockTable(self._tree_blocks))

    def leave(self, engine: str) -> None:
        super().leave(engine)
        self._trees.pop(engine, None)

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        chosen = self._fewest(usable) if self._uneven(usable) else self._by_prefix(usable, blocks)
        self._trees[chosen].commit(blocks.hashes)
        return chosen

    def _uneven(self, usable: list[str]) -> bool:
        counts = [self.running[engine] for engine in usable]
        most, fewest = max(counts), min(counts)
        return most - fewest > self._absolute and most > self._relative * fewest

    def _by_prefix(self, usable: list[str], blocks: Blocks) -> str:
        matches = {engine: self._trees[engine].match(blocks.hashes) for engine in usable}
        best = max(usable, key=matches.__getitem__)
        if matches[best] * blocks.size > self._threshold * blocks.length:
            return best
        return self._fewest(usable)

    def _fewest(self, usable: list[str]) -> str:
        fewest = min(self.running[engine] for engine in usable)
        return self._dice.choice([one for one in usable if self.running[one] == fewest])
