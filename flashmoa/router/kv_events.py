"""SGLang's KV events as block hashes of the router's own; pure.

An engine reports pages by its own hashes, with their tokens and the page before them. Its pages
may be shorter than the router's blocks, down to one token. Nothing is assumed of how it hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoa.router.blocks import BLOCK_TOKENS, first_hash, next_hash


@dataclass(frozen=True, slots=True)
class _Page:
    """Where a page ends: the last whole block's hash before that, and the tokens behind it."""

    block: int
    rest: tuple[int, ...]
    # The blocks that end in this page.
    ending: tuple[int, ...]


class PageMirror:
    """One cache's pages, as far as the blocks that end in them are concerned.

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
        """Pages were stored, one after the other; the blocks that this completes, each once.

        Pages whose parent is not known, because its event was lost, are left out.
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
            before = self._follow(before, own)
            if page not in self._pages:
                completed += before.ending
            self._pages[page] = before
        return completed

    def _follow(self, before: _Page, tokens: Sequence[int]) -> _Page:
        rest = (*before.rest, *tokens)
        block, ending = before.block, list[int]()
        while len(rest) >= self._size:
            block = next_hash(block, rest[: self._size])
            rest = rest[self._size :]
            ending.append(block)
        return _Page(block, rest, tuple(ending))

    def removed(self, pages: Sequence[int]) -> list[int]:
        """Pages were removed; the blocks that are gone with them."""
        gone: list[int] = []
        for page in pages:
            if (known := self._pages.pop(page, None)) is not None:
                gone += known.ending
        return gone

    def clear(self) -> list[int]:
        """There are no pages any more; the blocks that are gone with them."""
        return self.removed(tuple(self._pages))
