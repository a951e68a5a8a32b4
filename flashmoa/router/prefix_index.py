"""Find which engines have the beginning of a prompt (`PrefixIndex`); pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class PrefixIndex:
    """Maps each block to the engines that have it, so that one search matches a prompt with all.

    An engine is one bit, and several engines are the sum of their bits. An engine that has a block
    has all blocks before it, too, because engines evict a prompt's end before its beginning. So a
    search of a prompt with ``n`` blocks looks at about ``log2(n)`` of them for each length that
    engines have of it.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._bits = 0

    def __len__(self) -> int:
        return len(self._holders)

    def new_engine(self) -> int:
        """Return the bit of a new engine."""
        free = ~self._bits & (self._bits + 1)
        self._bits |= free
        return free

    def forget_engine(self, engine: int) -> None:
        """Give back the bit of an engine that has no blocks left."""
        self._bits &= ~engine

    def add(self, block: int, engine: int) -> None:
        self._holders[block] = self._holders.get(block, 0) | engine

    def discard(self, block: int, engine: int) -> None:
        if left := self._holders.get(block, 0) & ~engine:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return how many of a prompt's first blocks each engine has, without engines with none."""
        matched: dict[int, int] = {}
        if not hashes:
            return matched
        holders = self._holders
        # Each search: engines that have the first ``low`` blocks, and at most ``high``.
        searches = [(1, len(hashes), holders.get(hashes[0], 0))]
        while searches:
            low, high, engines = searches.pop()
            while engines and low < high:
                middle = (low + high + 1) // 2
                further = engines & holders.get(hashes[middle - 1], 0)
                if further != engines:
                    searches.append((low, middle - 1, engines & ~further))
                low, engines = middle, further
            matched.update(dict.fromkeys(_single_bits(engines), low))
        return matched


def _single_bits(engines: int) -> Iterator[int]:
    while engines:
        lowest = engines & -engines
        yield lowest
        engines ^= lowest
