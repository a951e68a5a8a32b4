"""Prompts and engines' caches as block hashes; pure.

Two prompts share their first ``n`` blocks exactly if their first ``n`` hashes are equal, so a hash
look-up tells how much of a prompt an engine has cached (MoE-Prefill §7.2).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 16
# The usual length of a token of English text. It stands in where no tokenizer is available.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt's whole blocks.

    Attributes:
        hashes: one for each whole block, over that block and all before it; 64 bits each.
        length: of the whole prompt, in tokens.
        size: of a block, in tokens.
    """

    hashes: tuple[int, ...]
    length: int
    size: int = BLOCK_TOKENS

    def tokens(self, matched: int) -> int:
        """Return how many tokens need no computing if ``matched`` blocks are cached.

        Never all of them: engines compute a prompt's last token again, to sample after it.
        """
        return max(0, min(matched * self.size, self.length - 1))


def first_hash(salt: str = "") -> int:
    """Return the hash before the first block of prompts under this cache salt."""
    return _hash(0, salt.encode()) if salt else 0


def next_hash(before: int, tokens: Sequence[int]) -> int:
    """Return the hash of a block after the hash ``before``. ``tokens``: ids below 2**32."""
    return _hash(before, array("I", tokens).tobytes())


def token_blocks(tokens: Sequence[int], size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a tokenised prompt, ``size`` tokens each."""
    return _blocks(array("I", tokens).tobytes(), array("I").itemsize, len(tokens), size, salt)


def text_blocks(text: str, size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a text whose tokens are not known, about ``size`` tokens each."""
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    length = -(-len(text) // CHARACTERS_PER_TOKEN)
    return _blocks(encoded, 4 * CHARACTERS_PER_TOKEN, length, size, salt)


def _blocks(encoded: bytes, width: int, length: int, size: int, salt: str) -> Blocks:
    """Hash a prompt block by block. ``width``: bytes of a token in ``encoded``."""
    if size < 1:
        raise ValueError(f"a block of {size} tokens is impossible; give a size of at least 1")
    step = width * size
    view = memoryview(encoded)
    hashes: list[int] = []
    last = first_hash(salt)
    for end in range(step, len(encoded) + 1, step):
        last = _hash(last, view[end - step : end])
        hashes.append(last)
    return Blocks(tuple(hashes), length, size)


def _hash(before: int, content: bytes | memoryview) -> int:
    digest = blake2b(before.to_bytes(8, "little"), digest_size=8)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class _Page:
    """The end of a page: the hash of the last whole block, and the tokens after that block."""

    block: int
    rest: tuple[int, ...]
    # The blocks that end in this page.
    ending: tuple[int, ...]


class PageMirror:
    """The pages of one engine's cache, translated into the router's block hashes.

    An engine's KV events name pages by hashes of its own, with their tokens and the page before
    them. Its pages may be shorter than the router's blocks, down to one token. Nothing is assumed
    about how the engine hashes.

    Args:
        size: tokens of a block.
    """

    def __init__(self, size: int = BLOCK_TOKENS) -> None:
        self._size = size
        self._pages: dict[int, _Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def stored(
        self,
        pages: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        page_size: int,
        salt: str = "",
    ) -> list[int]:
        """Record consecutive pages that were stored; return the blocks they complete, each once.

        Pages whose parent is unknown, because its event was lost, are left out.
        """
        if parent is None:
            before: _Page | None = _Page(first_hash(salt), (), ())
        else:
            before = self._pages.get(parent)
        if before is None:
            return []
        completed: list[int] = []
        for place, page in enumerate(pages):
            own = tokens[place * page_size : (place + 1) * page_size]
            before = self._page_after(before, own)
            if page not in self._pages:
                completed += before.ending
            self._pages[page] = before
        return completed

    def _page_after(self, before: _Page, tokens: Sequence[int]) -> _Page:
        rest = (*before.rest, *tokens)
        block, ending = before.block, list[int]()
        while len(rest) >= self._size:
            block = next_hash(block, rest[: self._size])
            rest = rest[self._size :]
            ending.append(block)
        return _Page(block, rest, tuple(ending))

    def removed(self, pages: Sequence[int]) -> list[int]:
        """Record that pages were removed; return the blocks that are gone with them."""
        gone: list[int] = []
        for page in pages:
            if (known := self._pages.pop(page, None)) is not None:
                gone += known.ending
        return gone

    def clear(self) -> list[int]:
        """Record that all pages are gone; return the blocks that are gone with them."""
        return self.removed(tuple(self._pages))
