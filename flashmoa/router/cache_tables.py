"""Represent prompts as hashes of their blocks (`Blocks`), and record what engines have cached and
have yet to compute (`EngineTables`); pure.

Two prompts share their first ``n`` blocks exactly if their first ``n`` hashes are equal, so looking
up hashes shows how much of a prompt an engine has cached (MoE-Prefill §7.2).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from flashmoa.router.flops import TOKENS, Measure

BLOCK_TOKENS = 16
# The usual length of a token of English text, which is used if no tokenizer is available.
CHARACTERS_PER_TOKEN = 4
# By how much an engine's threshold exceeds its largest forward, for the time between two forwards
# (kappa in MoE-Prefill, Eq. 3).
SATURATION_MARGIN = 1.2
# An engine reports blocks when it schedules them, and may have scheduled the forward after the one
# that it computes. So at most so many times its threshold is reported and not computed.
_COMPUTING = 2
# Short siblings may fill an engine up to so many times its threshold.
_SIBLINGS_FILL = 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt, cut into blocks of equal size.

    Attributes:
        hashes: one 64-bit hash for each whole block, over that block and all blocks before it.
        length: number of tokens in the whole prompt.
        size: number of tokens in a block.
        is_list: whether it is a list of prompts, which are one request and begin alike. The hashes
            are of the list's beginning only, and ``length`` counts what the prompts share once.
    """

    hashes: tuple[int, ...]
    length: int
    size: int = BLOCK_TOKENS
    is_list: bool = False

    def cached_tokens(self, matched: int) -> int:
        """Return how many tokens need not be computed if the first ``matched`` blocks are cached.

        This is less than ``length``: engines compute a prompt's last token again, because they
        sample from its output.
        """
        return max(0, min(matched * self.size, self.length - 1))


def token_blocks(tokens: Sequence[int], size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a prompt of token ids below 2**32, ``size`` tokens each."""
    encoded = array("I", tokens)
    return _blocks(encoded.tobytes(), encoded.itemsize, len(tokens), size, salt)


def text_blocks(text: str, size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a text whose tokens are not known, about ``size`` tokens each."""
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    return _blocks(encoded, 4 * CHARACTERS_PER_TOKEN, token_count(len(text)), size, salt)


def token_count(characters: int) -> int:
    """Return about how many tokens a text of this length has."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def first_hash(salt: str) -> int:
    """Return the hash that precedes the first block of prompts with this cache salt."""
    return next_hash(0, salt.encode(errors="surrogatepass")) if salt else 0


def next_hash(previous: int, content: bytes | memoryview) -> int:
    """Return the hash of a block, given that of the block before it."""
    digest = blake2b(previous.to_bytes(8, "little"), digest_size=8)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


def _blocks(encoded: bytes, width: int, length: int, size: int, salt: str) -> Blocks:
    """Hash a prompt block by block. ``width``: number of bytes per token in ``encoded``."""
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
    """Describes an engine to a policy.

    Attributes:
        measure: measures the engine's work.
        saturation: the threshold ``T``: from how many tokens on, which the engine has yet to
            compute, its forwards are full; ``None`` if it takes every request.
        cache_blocks: the most blocks that the engine's cache holds; ``None`` if the engine reports
            every eviction itself.
    """

    measure: Measure = TOKENS
    saturation: int | None = None
    cache_blocks: int | None = None


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

    def new_engine(self) -> int:
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


class BlockTable:
    """Records one engine's blocks, by hash.

    *Committed* blocks are in the cache. *Pending* blocks will be computed by requests that were
    sent to the engine. Because both count as a match, a burst of siblings goes to one engine
    (MoE-Prefill §B.2). A wrong entry costs time; it never makes an answer wrong.

    Args:
        capacity: the most committed blocks; the least recently used ones are forgotten first.
            ``None`` if the engine reports its evictions itself.
        index: learns which blocks this engine has, among others.

    Attributes:
        engine: the engine's bit in the index.
    """

    def __init__(self, capacity: int | None = None, index: PrefixIndex | None = None) -> None:
        self.capacity = capacity
        self._index = index if index is not None else PrefixIndex()
        self.engine = self._index.new_engine()
        # Ordered by their last use, the oldest first.
        self._committed: dict[int, None] = {}
        # The number of requests that will compute each block.
        self._pending: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def promises(self, block: int) -> int:
        """Return the number of requests that will compute a block, or use it."""
        return self._pending.get(block, 0)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are committed or pending."""
        return self._index.match(hashes).get(self.engine, 0)

    def match_committed(self, hashes: Sequence[int], matched: int) -> int:
        """Return how many of a prompt's first blocks are committed, at most ``matched``."""
        return bisect_left(range(matched), True, key=lambda i: hashes[i] not in self._committed)

    def promise(self, hashes: Iterable[int]) -> None:
        """Add blocks that a request will compute."""
        for block in hashes:
            self._pending[block] += 1
            self._index.add(block, self.engine)

    def release(self, hashes: Iterable[int]) -> None:
        """Withdraw one request's promise, whether it has computed the blocks or never will."""
        for block in hashes:
            if self._pending[block] > 1:
                self._pending[block] -= 1
            else:
                del self._pending[block]
                if block not in self._committed:
                    self._index.discard(block, self.engine)

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
            else:
                self._index.add(block, self.engine)
            self._committed[block] = None
        while self.capacity is not None and len(self._committed) > self.capacity:
            self._forget(next(iter(self._committed)))
        return fulfilled

    def evict(self, hashes: Iterable[int]) -> None:
        for block in hashes:
            if block in self._committed:
                self._forget(block)

    def clear(self) -> None:
        """Empty the cache; pending blocks stay pending."""
        self.evict(tuple(self._committed))

    def withdraw(self) -> None:
        """Remove all blocks and the engine itself from the index."""
        for block in (*self._committed, *self._pending):
            self._index.discard(block, self.engine)
        self._index.forget_engine(self.engine)

    def _forget(self, block: int) -> None:
        del self._committed[block]
        if block not in self._pending:
            self._index.discard(block, self.engine)


class PrefillLoad:
    """Adds up one engine's load: what its requests still cost, without cached prefixes.

    Engines report progress in tokens and not by request, so it is subtracted from the oldest
    requests first. Because costs are whole numbers that add up exactly, the load does not drift,
    is never negative, and is 0 when nothing is left (MoE-Prefill §7.3, §B.2).

    Attributes:
        total: the load ``W``, in units of ``measure``.
        tokens: number of tokens that are still to be computed.
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.total = 0
        self.tokens = 0
        # The next token and the end of each prompt with work left, by request in order of arrival.
        self._left: dict[str, tuple[int, int]] = {}

    def add(self, request: str, start: int, end: int) -> None:
        """Add a request whose tokens ``start`` to ``end`` are to be computed."""
        if start < end:
            self._left[request] = (start, end)
            self.total += self.measure.work(start, end)
            self.tokens += end - start

    def subtract_computed(self, tokens: int) -> None:
        """Subtract prompt tokens that the engine has computed."""
        while tokens > 0 and self._left:
            request = next(iter(self._left))
            start, end = self._left[request]
            computed = min(tokens, end - start)
            tokens -= computed
            self.advance(request, start + computed)

    def advance(self, request: str, position: int) -> None:
        """Subtract a request's tokens before ``position``, unless they were subtracted before.

        A position behind the request's end subtracts all that is left. Repeating this is harmless.
        """
        start, end = self._left.get(request, (0, 0))
        position = min(position, end)
        if start >= position:
            return
        self.total -= self.measure.work(start, position)
        self.tokens -= position - start
        if position < end:
            self._left[request] = (position, end)
        else:
            del self._left[request]


class EngineTables:
    """Holds what is known of one engine.

    Attributes:
        blocks: the blocks that it has, or will have.
        load: what it has not reported as computed, or answered.
        unanswered: what it has not answered.
        requests: the names of the requests that it has.
    """

    def __init__(self, traits: EngineTraits, index: PrefixIndex) -> None:
        self.traits = traits
        self.blocks = BlockTable(traits.cache_blocks, index)
        self.load = PrefillLoad(traits.measure)
        self.unanswered = PrefillLoad(traits.measure)
        self.requests: set[str] = set()

    def add(self, request: str, start: int, prompt: Blocks) -> None:
        """Add a request whose tokens from ``start`` on are to be computed."""
        self.requests.add(request)
        self.blocks.promise(prompt.hashes)
        for load in (self.load, self.unanswered):
            load.add(request, start, prompt.length)

    def answer(self, request: str, until: int) -> None:
        """Record that a request's tokens before ``until`` are answered.

        What an engine answers, it has computed, though it may not have reported it.
        """
        for load in (self.load, self.unanswered):
            load.advance(request, until)

    @property
    def backlog(self) -> int:
        """Return the work before a new request: the load, and what the engine is computing.

        A request whose answer comes late, because it is long, does not count as work for so long.
        """
        limit = self.traits.saturation
        tokens = self.unanswered.tokens - self.load.tokens
        if limit is None or not tokens:
            return self.load.total
        computing = self.unanswered.total - self.load.total
        return self.load.total + computing * min(tokens, _COMPUTING * limit) // tokens

    @property
    def is_saturated(self) -> bool:
        limit = self.traits.saturation
        return limit is not None and self.load.tokens >= limit

    @property
    def takes_siblings(self) -> bool:
        # So that not all of a burst's work is fixed to one engine while others get idle.
        limit = self.traits.saturation
        return limit is not None and self.load.tokens < _SIBLINGS_FILL * limit
