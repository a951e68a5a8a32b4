"""What the router believes about one engine: what is cached, and what is left to compute; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from flashmoa.router.flops import Measure


class BlockTable:
    """One engine's blocks, by hash.

    *Committed* blocks are in the cache. *Pending* ones are promised by requests that were routed
    there and are not computed yet: they make a burst of siblings converge on one engine
    (MoE-Prefill §B.2). Both are soft state: a wrong entry costs time, never an answer.

    Args:
        capacity: the most committed blocks; beyond it the least recently used ones are forgotten.
            ``None`` where the engine reports its evictions itself.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        # In the order of their last use.
        self._committed: dict[int, None] = {}
        # Each with the number of requests that promise it.
        self._pending: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def pending(self) -> int:
        """Return the number of pending blocks."""
        return len(self._pending)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are committed or pending."""
        committed, pending = self._committed, self._pending
        for place, block in enumerate(hashes):
            if block not in committed and block not in pending:
                return place
        return len(hashes)

    def promised(self, hashes: Sequence[int]) -> int:
        """Return how many blocks at the end of these are only pending, behind committed ones."""
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
        """Remove one request's promise, because it is fulfilled or will not be."""
        for block in hashes:
            if self._pending[block] > 1:
                self._pending[block] -= 1
            else:
                del self._pending[block]

    def commit(self, hashes: Sequence[int]) -> int:
        """Add blocks to the cache as the most recently used ones.

        A prompt's last blocks count as the older ones: an engine evicts what follows a prefix
        before the prefix. Returns how many of the blocks were pending and not committed yet.
        """
        arrived = 0
        for block in reversed(hashes):
            if block in self._committed:
                del self._committed[block]
            elif block in self._pending:
                arrived += 1
            self._committed[block] = None
        while self.capacity is not None and len(self._committed) > self.capacity:
            del self._committed[next(iter(self._committed))]
        return arrived

    def evict(self, hashes: Iterable[int]) -> None:
        """Remove blocks from the cache."""
        for block in hashes:
            self._committed.pop(block, None)

    def clear(self) -> None:
        """Empty the cache; pending blocks are still to come."""
        self._committed.clear()


class PrefillLoad:
    """One engine's ``W``: what its requests still cost, with cached prefixes taken off.

    Engines report progress in tokens and not by request, so it is booked on the oldest request
    first. Raising and lowering use one measure of whole numbers: ``W`` never drifts, is never
    negative, and is 0 when nothing is left (MoE-Prefill §7.3, §B.2).
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.total = 0
        # For each request with work left, in order of arrival: its first token and its end.
        self._left: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, request: str, start: int, end: int) -> None:
        """Add a request whose tokens ``start`` to ``end`` are to be computed.

        Raises: ValueError for a request that was added already.
        """
        if request in self._left:
            raise ValueError(f"request {request!r} is counted already; end it first")
        if start < end:
            self._left[request] = (start, end)
            self.total += self.measure.work(start, end)

    def executed(self, tokens: int) -> None:
        """Subtract prompt tokens that the engine has computed."""
        while tokens > 0 and self._left:
            request, (start, end) = next(iter(self._left.items()))
            done = min(tokens, end - start)
            tokens -= done
            self.total -= self.measure.work(start, start + done)
            if start + done == end:
                del self._left[request]
            else:
                self._left[request] = (start + done, end)

    def end(self, request: str) -> None:
        """Subtract what is left of a request, computed or not; harmless to repeat."""
        if (left := self._left.pop(request, None)) is not None:
            self.total -= self.measure.work(*left)
