"""The intra-turn prefix cache: a temporary radix tree of the tokens that one batch computes.

FlashAgents §3.2, Algorithm 2: sequences that are not computed yet are merged into a radix tree, and
each unique node is computed once, parents before children. A :class:`Turn` is used while one batch
is built. Time and memory are linear in its tokens, which are only the uncached ones. The engine's
own radix tree is not changed.
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
# A request waits for the next forward only for at least this many shared tokens.
WORTH_WAITING = 32


@dataclass(slots=True)
class _Node(Generic[Owner]):
    """A run of tokens that ``owner`` computes; ``later``: in a later batch and not in this one."""

    tokens: Tokens
    owner: Owner
    later: bool
    children: dict[bytes, _Node[Owner]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shared(Generic[Owner]):
    """The beginning of a sequence that other requests compute.

    ``now``: number of tokens computed in this batch, of which ``owner`` computes the last.
    ``later``: number of tokens after those, which are computed in later batches.
    """

    now: int = 0
    later: int = 0
    owner: Owner | None = None

    def take(self, within_forward: bool) -> int | None:
        """Return how many tokens to take from this batch; ``None``: wait for the next batch.

        Args: within_forward: whether a request can read KV that another of its batch writes.
        """
        next_batch = self.later if within_forward else self.now + self.later
        if next_batch >= WORTH_WAITING:
            return None
        return self.now if within_forward else 0


class Turn(Generic[Owner]):
    """Holds the unique tokens of one batch.

    Each sequence starts where its cached prefix ends. An ``anchor`` identifies that point: equal
    anchors mean that the tokens before it are equal, in the same namespace (salt, adapter).

    Args:
        page_size: tokens in a KV page; only whole pages are shared.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._roots: dict[Hashable, dict[bytes, _Node[Owner]]] = {}

    def match(self, anchor: Hashable, tokens: Tokens) -> Shared[Owner]:
        """Return which of ``tokens`` other requests compute."""
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

        It computes or shares ``tokens[:computed]`` in this batch, and the rest in later batches.
        """
        computed -= computed % self._page
        children = self._roots.setdefault(anchor, {})
        children = self._insert(owner, children, tokens[:computed], later=False)
        rest = tokens[computed : len(tokens) - len(tokens) % self._page]
        self._insert(owner, children, rest, later=True)

    def _insert(
        self, owner: Owner, children: dict[bytes, _Node[Owner]], tokens: Tokens, later: bool
    ) -> dict[bytes, _Node[Owner]]:
        """Walk along ``tokens`` and add new nodes. Return the last node's children."""
        while len(tokens):
            first = self._first_page(tokens)
            node = children.get(first)
            if node is None:
                node = children[first] = _Node(tokens, owner, later)
            common = self._common(node.tokens, tokens)
            if common < len(node.tokens):
                self._split(node, common)
            if node.later and not later:
                # It was planned for a later batch, but this request computes it in this batch.
                node.owner, node.later = owner, False
            tokens, children = tokens[common:], node.children
        return children

    def _split(self, node: _Node[Owner], at: int) -> None:
        rest = _Node(node.tokens[at:], node.owner, node.later, node.children)
        node.tokens, node.children = node.tokens[:at], {self._first_page(rest.tokens): rest}

    def _first_page(self, tokens: Tokens) -> bytes:
        """Return the key of a child: children differ in their first page and have at least one."""
        return tokens[: self._page].tobytes()

    def _common(self, a: Tokens, b: Tokens) -> int:
        """Return the length of the common prefix, in whole pages."""
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        common = int(different[0]) if len(different) else length
        return common - common % self._page
