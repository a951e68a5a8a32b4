"""Model one engine: which blocks it has cached, and how much it has yet to compute; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from flashmoa.router.flops import Measure


class BlockTable:
    """Records one engine's blocks, by hash.

    *Committed* blocks are in the cache. *Pending* blocks will be computed by requests that were
    sent to the engine. Because both count as a match, a burst of siblings goes to one engine
    (MoE-Prefill §B.2). A wrong entry costs time; it never makes an answer wrong.

    Args:
        capacity: the most committed blocks; the least recently used ones are forgotten first.
            ``None`` if the engine reports its evictions itself.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        # Ordered by their last use, the oldest first.
        self._committed: dict[int, None] = {}
        # The number of requests that will compute each block.
        self._pending: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._committed)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are committed or pending."""
        committed, pending = self._committed, self._pending
        for index, block in enumerate(hashes):
            if block not in committed and block not in pending:
                return index
        return len(hashes)

    def count_trailing_pending(self, hashes: Sequence[int]) -> int:
        """Return how many of these blocks, which match, follow the last committed one."""
        count = 0
        for block in reversed(hashes):
            if block in self._committed:
                break
            count += 1
        return count

    def promise(self, hashes: Iterable[int]) -> None:
        """Add blocks that a request will compute."""
        self._pending.update(hashes)

    def release(self, hashes: Iterable[int]) -> None:
        """Withdraw one request's promise, whether it has computed the blocks or never will."""
        for block in hashes:
            if self._pending[block] > 1:
                self._pending[block] -= 1
            else:
                del self._pending[block]

    def commit(self, hashes: Sequence[int]) -> int:
        """Add blocks to the cache as the most recently used ones.

        A prompt's last blocks count as older than its first ones, because an engine evicts the end
        of a prompt before its beginning. Return how many of the blocks were only pending before.
        """
        fulfilled = 0
        for block in reversed(hashes):
            if block in self._committed:
                del self._committed[block]
            elif block in self._pending:
                fulfilled += 1
            self._committed[block] = None
        while self.capacity is not None and len(self._committed) > self.capacity:
            del self._committed[next(iter(self._committed))]
        return fulfilled

    def evict(self, hashes: Iterable[int]) -> None:
        """Remove blocks from the cache."""
        for block in hashes:
            self._committed.pop(block, None)

    def clear(self) -> None:
        """Empty the cache; pending blocks stay pending."""
        self._committed.clear()


class PrefillLoad:
    """Adds up one engine's load ``W``: what its requests still cost, without cached prefixes.

    Engines report progress in tokens and not by request, so it is subtracted from the oldest
    requests first. Because costs are whole numbers that add up exactly, ``W`` does not drift, is
    never negative, and is 0 when nothing is left (MoE-Prefill §7.3, §B.2).
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.total = 0
        # The next token and the end of each prompt with work left, by request in order of arrival.
        self._left: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, request: str, start: int, end: int) -> None:
        """Add a request whose tokens ``start`` to ``end`` are to be computed.

        Raises: ValueError if the request was added already.
        """
        if request in self._left:
            raise ValueError(f"request {request!r} is counted already; end it first")
        if start < end:
            self._left[request] = (start, end)
            self.total += self.measure.work(start, end)

    def subtract_computed(self, tokens: int) -> None:
        """Subtract prompt tokens that the engine has computed."""
        while tokens > 0 and self._left:
            request, (start, end) = next(iter(self._left.items()))
            computed = min(tokens, end - start)
            tokens -= computed
            self.total -= self.measure.work(start, start + computed)
            if start + computed == end:
                del self._left[request]
            else:
                self._left[request] = (start + computed, end)

    def remove(self, request: str) -> None:
        """Subtract what is left of a request; harmless to repeat."""
        if (left := self._left.pop(request, None)) is not None:
            self.total -= self.measure.work(*left)
