"""The intra-turn prefix cache: what one batch computes, as a temporary radix tree.

FlashAgents §3.2, Algorithm 2: sequences that are not computed yet are merged into a radix
tree, and each unique node is computed once, parents before children. One :class:`Turn` lives
while one batch is put together. Time and memory are linear in the tokens it is given, which
are the uncached ones only; the engine's own radix tree is untouched.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]

Owner = TypeVar("Owner")
# Fewer shared tokens than this are not worth waiting a forward for.
WORTH_WAITING = 32


@dataclass(slots=True)
class _Node(Generic[Owner]):
    """A run of tokens; ``later``: its owner computes it in a later batch, not in this one."""

    tokens: Tokens
    owner: Owner
    later: bool
    children: dict[bytes, _Node[Owner]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shared(Generic[Owner]):
    """The part of a sequence that others are computing already, in tokens from its start.

    ``now``: those computed in this batch, the last of them by ``owner``. ``later``: the tokens
    after those, which are computed in later batches.
    """

    now: int = 0
    later: int = 0
    owner: Owner | None = None

    def take(self, within_forward: bool) -> int | None:
        """Return how many tokens to take from this batch, or ``None``: wait for the next one.

        ``within_forward``: requests of one batch can read what others of it write.
        """
        coming = self.later if within_forward else self.now + self.later
        if coming >= WORTH_WAITING:
            return None
        return self.now if within_forward else 0


class Turn(Generic[Owner]):
    """The unique tokens of one batch.

    Sequences start where the engine's cache ends for them. An ``anchor`` names that point:
    equal anchors mean equal tokens before it, in the same namespace (salt, adapter).

    Args:
        page_size: tokens per KV page; only whole pages are shared.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._roots: dict[Hashable, dict[bytes, _Node[Owner]]] = {}

    def match(self, anchor: Hashable, tokens: Tokens) -> Shared[Owner]:
        """Return which of ``tokens`` are already being computed."""
        now, later, owner = 0, 0, None
        children = self._roots.get(anchor, {})
        while node := children.get(self._first_page(tokens[now + later :])):
            common = self._common(node.tokens, tokens[now + later :])
            if node.later:
                later += common
            else:
                now, owner = now + common, node.owner
            if common < len(node.tokens):
                break
            children = node.children
        return Shared(now, later, owner)

    def add(self, owner: Owner, anchor: Hashable, tokens: Tokens, computed: int) -> None:
        """Add a request that joins the batch.

        It computes ``tokens[:computed]`` in this batch, but for what it shares, and the rest
        in later ones.
        """
        computed -= computed % self._page
        children = self._roots.setdefault(anchor, {})
        children = self._insert(owner, children, tokens[:computed], later=False)
        rest = tokens[computed : len(tokens) - len(tokens) % self._page]
        self._insert(owner, children, rest, later=True)

    def _insert(
        self, owner: Owner, children: dict[bytes, _Node[Owner]], tokens: Tokens, later: bool
    ) -> dict[bytes, _Node[Owner]]:
        """Walk down ``tokens``, adding what is new; return the children where they end."""
        while len(tokens):
            first = self._first_page(tokens)
            node = children.get(first)
            if node is None:
                node = children[first] = _Node(tokens, owner, later)
            common = self._common(node.tokens, tokens)
            if common < len(node.tokens):
                self._split(node, common)
            if node.later and not later:
                # Planned for a later batch, but this request computes it in this one.
                node.owner, node.later = owner, False
            tokens, children = tokens[common:], node.children
        return children

    def _split(self, node: _Node[Owner], at: int) -> None:
        rest = _Node(node.tokens[at:], node.owner, node.later, node.children)
        node.tokens, node.children = node.tokens[:at], {self._first_page(rest.tokens): rest}

    def _first_page(self, tokens: Tokens) -> bytes:
        """Return a child's key: children differ in their first page, and have one at least."""
        return tokens[: self._page].tobytes()

    def _common(self, a: Tokens, b: Tokens) -> int:
        """Return the length of the common prefix, in whole pages."""
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        common = int(different[0]) if len(different) else length
        return common - common % self._page
