"""Represent prompts as hashes of their blocks (`Blocks`), and record what engines have cached and
have yet to compute (`EngineTables`). Pure. After MoE-Prefill, §7.2.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from flashmoa.router.flops import TOKENS, Measure
from flashmoa.router.saturation import FullLoad

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt of ``length`` tokens, cut into blocks of ``size`` tokens.

    There is one hash for each whole block, over that block and all blocks before it. So two prompts
    share their first ``n`` blocks exactly if their first ``n`` hashes are equal.
    """

    hashes: tuple[int, ...]
    length: int
    size: int = BLOCK_TOKENS

    def cached_tokens(self, matched: int) -> int:
        """Return how many tokens need not be computed if ``matched`` blocks are cached."""
        # Engines compute a prompt's last token again, because they sample from its output.
        return max(0, min(matched * self.size, self.length - 1))


def token_blocks(tokens: Sequence[int], size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a prompt of token ids below 2**32, ``size`` tokens each."""
    encoded = array("I", tokens)
    return _blocks(encoded.tobytes(), encoded.itemsize, len(tokens), size, salt)


def text_blocks(text: str, salt: str = "") -> Blocks:
    """Return the blocks of a text whose tokens are unknown, about ``BLOCK_TOKENS`` each."""
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    token_bytes = 16  # A token of English text usually has four characters.
    return _blocks(encoded, token_bytes, -(-len(encoded) // token_bytes), BLOCK_TOKENS, salt)


def first_hash(salt: str) -> int:
    """Return the hash that precedes the first block of prompts with this cache salt."""
    return next_hash(0, salt.encode(errors="surrogatepass")) if salt else 0


def next_hash(previous: int, content: bytes | memoryview) -> int:
    """Return the hash of a block, given the previous block's hash."""
    digest = blake2b(previous.to_bytes(8, "little"), digest_size=8)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


def _blocks(encoded: bytes, width: int, length: int, size: int, salt: str) -> Blocks:
    """Hash a prompt block by block. A token has ``width`` bytes in ``encoded``."""
    step = width * size
    view = memoryview(encoded)
    hashes: list[int] = []
    last = first_hash(salt)
    for end in range(step, len(encoded) + 1, step):
        last = next_hash(last, view[end - step : end])
        hashes.append(last)
    return Blocks(tuple(hashes), length, size)


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Describes an engine to the policy."""

    measure: Measure = TOKENS
    # With this load it is saturated. None: it never is.
    full: FullLoad | None = None
    # The number of blocks that fit its cache. None: unlimited.
    cache_blocks: int | None = None


class BlockTable:
    """Records one engine's blocks, by hash.

    *Committed* blocks are in the cache. The least recently used ones beyond ``capacity`` are
    forgotten. *Pending* blocks will be computed by requests that were sent to the engine. Both
    count as a match, so a burst of siblings goes to one engine (MoE-Prefill §B.2). An engine that
    has a block has all earlier blocks of the prompt, because engines evict a prompt's end first.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        # The least recently used block comes first.
        self._committed: dict[int, None] = {}
        self._pending: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._committed)

    def __contains__(self, block: int) -> bool:
        return block in self._committed or block in self._pending

    def promises(self, block: int) -> int:
        """Return the number of requests that will compute or use a block."""
        return self._pending[block]

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's leading blocks that are committed or pending."""
        return bisect_left(hashes, True, key=lambda block: block not in self)

    def match_committed(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's leading blocks that are committed."""
        return bisect_left(hashes, True, key=lambda block: block not in self._committed)

    def promise(self, hashes: Iterable[int]) -> None:
        """Add blocks that a request will compute."""
        self._pending.update(hashes)

    def release(self, hashes: Iterable[int]) -> None:
        """Withdraw one request's promise, whether it has computed the blocks or never will."""
        for block in hashes:
            self._pending[block] -= 1
            if not self._pending[block]:
                del self._pending[block]

    def commit(self, hashes: Sequence[int]) -> int:
        """Add blocks to the cache. Return the number of blocks that were only pending before."""
        fulfilled = 0
        # Engines evict the end of a prompt first, so its beginning counts as used last.
        for block in reversed(hashes):
            known = self._committed.pop(block, block) is None
            fulfilled += not known and block in self._pending
            self._committed[block] = None
        while self.capacity is not None and len(self._committed) > self.capacity:
            del self._committed[next(iter(self._committed))]
        return fulfilled

    def evict(self, hashes: Iterable[int] | None) -> None:
        """Remove blocks from the cache; ``None`` removes all. Pending blocks stay pending."""
        for block in tuple(self._committed) if hashes is None else hashes:
            self._committed.pop(block, None)


class PrefillLoad:
    """Adds up one engine's load ``W`` (``total``): its requests' uncomputed work beyond prefixes.

    Engines report progress in tokens and not by request, so it is subtracted from the oldest
    requests first. Costs are whole numbers that add up exactly. So the load does not drift, is
    never negative, and is 0 when no work is left (MoE-Prefill §7.3, §B.2).
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.total = 0
        self.tokens = 0
        # Each unfinished request's next token and prompt length, in order of arrival.
        self._left: dict[str, tuple[int, int]] = {}

    def add(self, request: str, start: int, end: int) -> None:
        """Add a request whose tokens ``start`` to ``end`` are to be computed."""
        if start < end:
            self._left[request] = (start, end)
            self._change(start, end, 1)

    def subtract_computed(self, tokens: int) -> None:
        """Subtract prompt tokens that the engine has computed."""
        while tokens > 0 and self._left:
            request = next(iter(self._left))
            start, end = self._left[request]
            if tokens >= end - start:
                self.finish(request)
            else:
                self._left[request] = (start + tokens, end)
                self._change(start, start + tokens, -1)
            tokens -= end - start

    def finish(self, request: str) -> None:
        """Subtract a request's remaining work. Repeating this changes nothing."""
        start, end = self._left.pop(request, (0, 0))
        self._change(start, end, -1)

    def _change(self, start: int, end: int, sign: int) -> None:
        self.total += sign * self.measure.work(start, end)
        self.tokens += sign * (end - start)


class EngineTables:
    """Holds one engine's blocks, load, and the names of its requests."""

    def __init__(self, traits: EngineTraits) -> None:
        self.traits = traits
        self.blocks = BlockTable(traits.cache_blocks)
        self.load = PrefillLoad(traits.measure)
        self.requests: set[str] = set()

    @property
    def is_saturated(self) -> bool:
        full = self.traits.full
        return full is not None and self.load.total >= full.work and self.load.tokens >= full.tokens
