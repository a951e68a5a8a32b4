"""What an engine's cache holds, as far as the router knows; pure.

*Committed* blocks are in the cache. *Pending* ones have been promised by requests that were routed
there and are not computed yet: they make a burst of siblings converge on one engine
(MoE-Prefill §B.2). Both are soft state: a wrong entry costs time, never an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockTable:
    """One engine's blocks, by hash.

    Args:
        capacity: committed blocks at most; the least recently used ones are forgotten beyond it.
            ``None`` where the engine says itself what it evicts.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        # In the order of their last use.
        self._committed: dict[int, None] = {}
        # By how many requests each is promised.
        self._pending: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def pending(self) -> int:
        """How many blocks are promised."""
        return len(self._pending)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are committed or pending."""
        committed, pending = self._committed, self._pending
        for place, block in enumerate(hashes):
            if block not in committed and block not in pending:
                return place
        return len(hashes)

    def promised(self, hashes: Sequence[int]) -> int:
        """How many of these, of which the first ones may be committed, are only pending."""
        count = 0
        for block in reversed(hashes):
            if block in self._committed:
                break
            count += 1
        return count

    def promise(self, hashes: Iterable[int]) -> None:
        self._pending.update(hashes)

    def release(self, hashes: Iterable[int]) -> None:
        """Take a promise back, or call it fulfilled."""
        for block in hashes:
            if self._pending[block] > 1:
                self._pending[block] -= 1
            else:
                del self._pending[block]

    def commit(self, hashes: Sequence[int]) -> int:
        """These blocks are in the cache, now the most recently used ones.

        A prompt's last blocks count as the older ones: an engine evicts a prefix after what
        follows on it. Returns how many of them were pending and new.
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
        for block in hashes:
            self._committed.pop(block, None)

    def clear(self) -> None:
        """The cache is empty; what is promised still comes."""
        self._committed.clear()
