"""The intra-turn prefix cache: a prefix that several requests share is computed once.

FlashAgents §3.2, Algorithm 2: sequences that are not computed yet are merged into a temporary radix
tree (:class:`BatchTree`), and each unique node is computed once, parents before children. SGLang's
own radix tree is not changed.

SGLang offers each waiting request to the batch. If the request shares tokens with one that is
already in the batch, it waits until these are in SGLang's radix tree: for one step where KV is
published once its forward has been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flashmoa_sglang.scheduler.request import is_shareable, state_of, total_tokens
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]

# A request waits for the next forward only for at least this many shared tokens.
FEWEST_SHARED = 32


@dataclass(slots=True)
class _Node:
    tokens: Tokens
    children: dict[bytes, _Node] = field(default_factory=dict)


class BatchTree:
    """The unique uncached tokens that the requests of a batch compute, in linear time and memory.

    Each sequence starts where its cached prefix ends. An ``anchor`` identifies that point: equal
    anchors mean equal tokens before it, in the same namespace (salt, adapter).

    Args:
        page_size: tokens in a KV page; only whole pages are shared.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._roots: dict[Hashable, dict[bytes, _Node]] = {}

    def match(self, anchor: Hashable, tokens: Tokens) -> int:
        """Return how many of the first ``tokens`` other requests compute."""
        shared = 0
        children = self._roots.get(anchor, {})
        while node := children.get(self._first_page(tokens[shared:])):
            common = self._common(node.tokens, tokens[shared:])
            shared += common
            if common < len(node.tokens):
                break
            children = node.children
        return shared

    def add(self, anchor: Hashable, tokens: Tokens) -> None:
        """Add the tokens that a request computes, in this batch and in later ones."""
        tokens = tokens[: len(tokens) - len(tokens) % self._page]
        children = self._roots.setdefault(anchor, {})
        while len(tokens):
            node = children.setdefault(self._first_page(tokens), _Node(tokens))
            common = self._common(node.tokens, tokens)
            if common < len(node.tokens):
                self._split(node, common)
            tokens, children = tokens[common:], node.children

    def _split(self, node: _Node, at: int) -> None:
        rest = _Node(node.tokens[at:], node.children)
        node.tokens, node.children = node.tokens[:at], {self._first_page(rest.tokens): rest}

    def _first_page(self, tokens: Tokens) -> bytes:
        """Return the key of a child: children differ in their first page."""
        return tokens[: self._page].tobytes()

    def _common(self, a: Tokens, b: Tokens) -> int:
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        common = int(different[0]) if len(different) else length
        return common - common % self._page


class SharedPrefill:
    """Lets a request wait for the tokens that an earlier request of the batch computes.

    ``avoided`` counts the tokens that requests did not compute because another request had.
    """

    def __init__(self, page_size: int) -> None:
        self._tree = BatchTree(page_size)
        self._entered = 0
        self.avoided = 0

    def admit(self, original: Callable[[], Any], adder: Any, req: Any) -> Any:
        """Add a request to the batch, or let it wait for the next batch.

        Args: original: ``PrefillAdder.add_one_req``, which has matched the request's prefix.
        """
        is_full = adder.rem_chunk_tokens is not None and adder.rem_chunk_tokens <= 0
        if not is_shareable(req) or is_full:
            return original()
        self._enter(adder.can_run_list)
        start = RELEASE.cached_tokens(req)
        tokens = _tokens(req, start, RELEASE.longest_prefix(req))
        shared = self._tree.match(_anchor(req, start), tokens)
        if shared >= FEWEST_SHARED and self._may_wait(req, start):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.CONTINUE
        result = original()
        first_wait = state_of(req).first_wait
        if first_wait is not None and adder.can_run_list and adder.can_run_list[-1] is req:
            # The prefix may have been evicted while the request waited.
            self.avoided += max(0, start - first_wait)
        return result

    def _may_wait(self, req: Any, start: int) -> bool:
        """Return whether a request may wait; it may not if the last wait did not help.

        An answer has the hidden states of computed tokens only, so its request shares no token.
        """
        state = state_of(req)
        if state.last_wait == start or req.return_hidden_states:
            return False
        if state.first_wait is None:
            state.first_wait = start
        state.last_wait = start
        return True

    def _enter(self, taken: Sequence[Any]) -> None:
        """Add the requests that have joined the batch since the last call."""
        for req in taken[self._entered :]:
            if is_shareable(req):
                start = RELEASE.cached_tokens(req)
                self._tree.add(_anchor(req, start), _tokens(req, start))
        self._entered = len(taken)


class QueuedTokens:
    """Counts the tokens that waiting requests have to compute, each shared token once.

    A request's count stays right when an earlier request has computed shared tokens, because these
    are then in the radix tree.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self.forget()

    def forget(self) -> None:
        """Forget the counted tokens, because requests leave the queue now."""
        self._tree = BatchTree(self._page)

    def count(self, tree_cache: Any, queue: Sequence[Any], enough: int) -> int:
        """Return the number of tokens, counted up to ``enough``; match each request once."""
        total = 0
        for req in queue:
            state = state_of(req)
            if state.unshared is None:
                state.unshared = self._unshared(tree_cache, req)
            total += state.unshared
            if total >= enough:
                break
        return total

    def _unshared(self, tree_cache: Any, req: Any) -> int:
        uncached = RELEASE.uncached_tokens(tree_cache, req)
        if not is_shareable(req):
            return uncached
        start = total_tokens(req) - uncached
        anchor, tokens = _anchor(req, start), _tokens(req, start)
        shared = self._tree.match(anchor, tokens)
        self._tree.add(anchor, tokens)
        return uncached - shared


def _tokens(req: Any, start: int, end: int | None = None) -> Tokens:
    """Return a copy of a request's tokens from ``start`` to ``end``."""
    return np.asarray((req.origin_input_ids + req.output_ids)[start:end], dtype=np.int64)


def _anchor(req: Any, start: int) -> Hashable:
    """Identify the point in the radix tree where a request's cached prefix ends."""
    return (RELEASE.namespace(req), req.last_node, start)
