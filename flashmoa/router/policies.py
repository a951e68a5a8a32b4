"""Define the interface of routing policies (`Policy`), and policies to compare with; pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flashmoa.router.blocks import Blocks
from flashmoa.router.engine_state import BlockTable
from flashmoa.router.flops import Measure, TokenCount

# By how much an engine's threshold exceeds its largest forward, for the time between two forwards
# (kappa in MoE-Prefill, Eq. 3).
SATURATION_MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Describes an engine to a policy.

    Attributes:
        measure: measures the engine's work.
        saturation: the threshold ``T``: from how many tokens on, which the engine has yet to
            compute, its forwards are full; ``None`` if it takes every request.
        cache_blocks: the most blocks that the engine's cache holds; ``None`` if the engine reports
            every eviction itself.
    """

    measure: Measure = field(default_factory=TokenCount)
    saturation: int | None = None
    cache_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has no engine yet. ``request`` is a unique name for it."""

    request: str
    blocks: Blocks


class Policy:
    """Decides to which engine each request is sent. Requests are identified by unique names."""

    def join(self, engine: str, traits: EngineTraits) -> None:
        """Add an engine, or give a known one new traits."""
        raise NotImplementedError

    def leave(self, engine: str) -> None:
        """Remove an engine, and forget its cache and its requests."""
        raise NotImplementedError

    def takes_requests(self) -> bool:
        """Return whether some engine takes any request.

        If none does, only a request that has just come may find an engine (:meth:`route`).
        """
        return True

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        """Return engines by request, for those requests in the queue that need not wait any longer.

        Args:
            queue: waiting requests in order of arrival.

        Raises: ValueError if a request in the queue has an engine already.
        """
        raise NotImplementedError

    def admit(self, waiting: WaitingRequest, engine: str, cached: int | None = None) -> None:
        """Record that a request is sent to an engine; :meth:`route` does so for those it places.

        Args:
            cached: number of tokens of its prompt that the engine has cached; by default, those
                that match.

        Raises: ValueError if the request has an engine already.
        """
        raise NotImplementedError

    def end(self, request: str) -> None:
        """Forget a request, whether its prompt is computed or not; harmless to repeat."""
        raise NotImplementedError

    def finish_prefill(self, request: str, items: int | None = None) -> None:
        """Record that a request's prompt is computed; harmless to repeat.

        Args:
            items: of a request with a list, how many of its prompts are computed in addition to
                those reported before; by default, all of them.
        """

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        """Record that an engine has cached blocks, and so has computed those that were pending."""

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        """Record that an engine has evicted blocks."""

    def clear_blocks(self, engine: str) -> None:
        """Record that an engine's cache is empty."""


class _RequestCountingPolicy(Policy):
    """Counts each engine's requests, and sends every request at once."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self._engine_of: dict[str, str] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.running.setdefault(engine, 0)

    def leave(self, engine: str) -> None:
        self.running.pop(engine, None)
        self._engine_of = {name: at for name, at in self._engine_of.items() if at != engine}

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        placed: dict[str, str] = {}
        for waiting in queue if self.running else ():
            placed[waiting.request] = engine = self._choose(list(self.running), waiting.blocks)
            self.admit(waiting, engine)
        return placed

    def admit(self, waiting: WaitingRequest, engine: str, cached: int | None = None) -> None:
        self._engine_of[waiting.request] = engine
        self.running[engine] += 1

    def _choose(self, engines: list[str], blocks: Blocks) -> str:
        raise NotImplementedError

    def end(self, request: str) -> None:
        if (engine := self._engine_of.pop(request, None)) is not None:
            self.running[engine] -= 1


class Random(_RequestCountingPolicy):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _choose(self, engines: list[str], blocks: Blocks) -> str:
        return self._random.choice(engines)


class RoundRobin(_RequestCountingPolicy):
    def __init__(self) -> None:
        super().__init__()
        self._turn = -1

    def _choose(self, engines: list[str], blocks: Blocks) -> str:
        self._turn += 1
        return engines[self._turn % len(engines)]


class CacheAware(_RequestCountingPolicy):
    """Implements ``cache_aware`` of sglang-router 0.3, with its defaults.

    If requests are spread unevenly, by both thresholds, the engine with the fewest requests gets
    the next one. Otherwise it is sent where the longest matching prefix was sent, if that is more
    than ``cache_threshold`` of the prompt, or else to the engine with the fewest requests (a random
    one if several have the fewest). The policy keeps a tree of the prompts that were sent to each
    engine, here in blocks and not in characters, and learns nothing from the engines' caches.

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
        self._cache_threshold = cache_threshold
        self._absolute_threshold = balance_abs_threshold
        self._relative_threshold = balance_rel_threshold
        self._tree_blocks = tree_blocks
        self._trees: dict[str, BlockTable] = {}

    def join(self, engine: str, traits: EngineTraits) -> None:
        super().join(engine, traits)
        self._trees.setdefault(engine, BlockTable(self._tree_blocks))

    def leave(self, engine: str) -> None:
        super().leave(engine)
        self._trees.pop(engine, None)

    def _choose(self, engines: list[str], blocks: Blocks) -> str:
        chosen = None if self._is_uneven() else self._longest_match(blocks)
        if chosen is None:
            chosen = self._least_loaded(engines)
        self._trees[chosen].commit(blocks.hashes)
        return chosen

    def _least_loaded(self, engines: Sequence[str]) -> str:
        fewest = min(self.running.values())
        return self._random.choice([e for e in engines if self.running[e] == fewest])

    def _is_uneven(self) -> bool:
        most, fewest = max(self.running.values()), min(self.running.values())
        difference = most - fewest
        return difference > self._absolute_threshold and most > self._relative_threshold * fewest

    def _longest_match(self, blocks: Blocks) -> str | None:
        """Return the engine with the longest matching prefix, if that is long enough."""
        matches = {engine: tree.match(blocks.hashes) for engine, tree in self._trees.items()}
        best = max(matches, key=matches.__getitem__)
        is_enough = matches[best] * blocks.size > self._cache_threshold * blocks.length
        return best if is_enough else None
