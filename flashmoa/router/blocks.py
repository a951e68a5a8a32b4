"""Represent prompts and engines' caches as block hashes (`Blocks`, `PageMirror`); pure.

Two prompts share their first ``n`` blocks exactly if their first ``n`` hashes are equal, so looking
up hashes shows how much of a prompt an engine has cached (MoE-Prefill §7.2).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

BLOCK_TOKENS = 16
# The usual length of a token of English text, which is used if no tokenizer is available.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt, cut into blocks of equal size.

    Attributes:
        hashes: one 64-bit hash for each whole block, over that block and all blocks before it.
        length: number of tokens in the whole prompt.
        size: number of tokens in a block.
        items: number of prompts in a list, which are one request and begin alike. The hashes are of
            the list's beginning only, and ``length`` counts what the prompts share once.
    """

    hashes: tuple[int, ...]
    length: int
    size: int = BLOCK_TOKENS
    items: int = 1

    def cached_tokens(self, matched: int) -> int:
        """Return how many tokens need not be computed if the first ``matched`` blocks are cached.

        This is less than ``length``: engines compute a prompt's last token again, because they
        sample from its output.
        """
        return max(0, min(matched * self.size, self.length - 1))

    def with_further_text(self, characters: int) -> Blocks:
        """Return this prompt followed by text of which only the length is known."""
        if not characters:
            return self
        return replace(self, length=self.length + -(-characters // CHARACTERS_PER_TOKEN))


def token_blocks(tokens: Sequence[int], size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a prompt of token ids below 2**32, ``size`` tokens each."""
    return _blocks(array("I", tokens).tobytes(), array("I").itemsize, len(tokens), size, salt)


def text_blocks(text: str, size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a text whose tokens are not known, about ``size`` tokens each."""
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    length = -(-len(text) // CHARACTERS_PER_TOKEN)
    return _blocks(encoded, 4 * CHARACTERS_PER_TOKEN, length, size, salt)


def _blocks(encoded: bytes, width: int, length: int, size: int, salt: str) -> Blocks:
    """Hash a prompt block by block. ``width``: number of bytes per token in ``encoded``."""
    if size < 1:
        raise ValueError(f"a block of {size} tokens is impossible; give a size of at least 1")
    step = width * size
    view = memoryview(encoded)
    hashes: list[int] = []
    last = _first_hash(salt)
    for end in range(step, len(encoded) + 1, step):
        last = _hash(last, view[end - step : end])
        hashes.append(last)
    return Blocks(tuple(hashes), length, size)


def _first_hash(salt: str) -> int:
    """Return the hash that precedes the first block of prompts with this cache salt."""
    return _hash(0, salt.encode()) if salt else 0


def _hash(previous: int, content: bytes | memoryview) -> int:
    digest = blake2b(previous.to_bytes(8, "little"), digest_size=8)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class _Page:
    """The state of a prompt at the end of one page.

    Attributes:
        block: hash of the last whole block.
        rest: tokens after that block.
        completed: hashes of the blocks that end in this page.
    """

    block: int
    rest: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()

    def next_page(self, tokens: Sequence[int], block_size: int) -> _Page:
        """Return the state at the end of the next page, which has these tokens."""
        rest = (*self.rest, *tokens)
        block, completed = self.block, list[int]()
        while len(rest) >= block_size:
            block = _hash(block, array("I", rest[:block_size]).tobytes())
            rest = rest[block_size:]
            completed.append(block)
        return _Page(block, rest, tuple(completed))


class PageMirror:
    """Translates the pages in one engine's cache into the router's block hashes.

    An engine's KV events identify a page by a hash that only the engine can compute, and give its
    tokens and the page before it. Pages may be shorter than the router's blocks, down to one token.

    Args:
        size: number of tokens in a block.
    """

    def __init__(self, size: int = BLOCK_TOKENS) -> None:
        self._size = size
        self._pages: dict[int, _Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def add(
        self,
        pages: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        page_size: int,
        salt: str = "",
    ) -> list[int]:
        """Record consecutive pages, and return the blocks that end in those that are new.

        Pages are ignored if their parent is unknown, because the event with the parent was lost.
        """
        last = _Page(_first_hash(salt)) if parent is None else self._pages.get(parent)
        if last is None:
            return []
        completed: list[int] = []
        for index, page in enumerate(pages):
            last = last.next_page(tokens[index * page_size : (index + 1) * page_size], self._size)
            if page not in self._pages:
                completed += last.completed
            self._pages[page] = last
        return completed

    def remove(self, pages: Sequence[int]) -> list[int]:
        """Forget pages, and return the blocks that ended in them."""
        removed = [self._pages.pop(page) for page in pages if page in self._pages]
        return [block for page in removed for block in page.completed]

    def clear(self) -> list[int]:
        """Forget all pages, and return the blocks that ended in them."""
        return self.remove(tuple(self._pages))
