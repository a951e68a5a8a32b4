"""The interface of routing policies, and policies to compare with; pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flashmoa.router.blocks import Blocks
from flashmoa.router.engine_state import BlockTable
from flashmoa.router.flops import Measure, TokenCount


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What a policy knows of an engine.

    Attributes:
        measure: the unit of its work.
        saturation: ``T``, in that unit; ``None``: the engine takes every request.
        cache_blocks: the most that its cache holds; ``None``: it reports every eviction itself.
    """

    measure: Measure = field(default_factory=TokenCount)
    saturation: int | None = None
    cache_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has no engine yet."""

    request: str
    blocks: Blocks


class Policy:
    """Decides where requests go. A request is known by a name of its own until it is ended."""

    def join(self, engine: str, traits: EngineTraits) -> None:
        """Add an engine, or give one new traits."""
        raise NotImplementedError

    def leave(self, engine: str) -> None:
        """Remove an engine, and forget all that is known of it and of its requests."""
        raise NotImplementedError

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        """Return the engines of those requests in the queue that need not wait any longer.

        ``queue``: in order of arrival. Raises: ValueError for a request that has an engine.
        """
        raise NotImplementedError

    def admit(self, one: WaitingRequest, engine: str, cached: int | None = None) -> None:
        """Give an engine, which has joined, a request that was not routed.

        Args:
            cached: tokens of its prompt that the engine has; ``None``: those that match.

        Raises: ValueError for a request that has an engine.
        """
        raise NotImplementedError

    def end(self, request: str) -> None:
        """Forget a request, computed or not; harmless to repeat."""
        raise NotImplementedError

    def computed(self, request: str) -> None:
        """Note that the request's prompt is computed."""

    def stored(self, engine: str, hashes: Collection[int]) -> None:
        """Note blocks that an engine's cache has; those that were promised are computed."""

    def removed(self, engine: str, hashes: Collection[int]) -> None:
        """Note blocks that an engine's cache no longer has."""

    def cleared(self, engine: str) -> None:
        """Note that an engine's cache is empty."""


class _RequestCounting(Policy):
    """Counts each engine's requests; every engine takes every request."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self._where: dict[str, str] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.running.setdefault(engine, 0)

    def leave(self, engine: str) -> None:
        self.running.pop(engine, None)
        self._where = {name: at for name, at in self._where.items() if at != engine}

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        placed: dict[str, str] = {}
        for one in queue:
            if usable := list(self.running):
                placed[one.request] = chosen = self._choose(usable, one.blocks)
                self.admit(one, chosen)
        return placed

    def admit(self, one: WaitingRequest, engine: str, cached: int | None = None) -> None:
        self._where[one.request] = engine
        self.running[engine] += 1

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        raise NotImplementedError

    def end(self, request: str) -> None:
        if (engine := self._where.pop(request, None)) is not None:
            self.running[engine] -= 1


class Random(_RequestCounting):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        return self._random.choice(usable)


class RoundRobin(_RequestCounting):
    def __init__(self) -> None:
        super().__init__()
        self._turn = -1

    def _choose(self, usable: list[str], blocks: Blocks) -> str:
        self._turn += 1
        return usable[self._turn % len(usable)]


class CacheAware(_RequestCounting):
    """The algorithm of sglang-router 0.3's ``cache_aware``, with its defaults.

    If requests are spread unevenly, by both thresholds, the engine with the fewest gets the
    request. Otherwise it goes where the longest prefix was sent, if that is more than
    ``cache_threshold`` of the prompt; else to the engine with the fewest requests, at random among
    equals. It keeps a tree of what each engine was sent, here in blocks and not in characters, and
    learns nothing about the engines' caches.

    Args:
        tree_blocks: the most blocks in each engine's tree.
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
        self._random = random.Random(seed)
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
        return self._random.choice([one for one in usable if self.running[one] == fewest])
