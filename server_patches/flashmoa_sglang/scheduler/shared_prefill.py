"""The intra-turn prefix cache: what requests of one prefill batch share is computed once.

FlashAgents §3.2, Algorithm 2: sequences that are not computed yet are merged into a temporary radix
tree (:class:`BatchTree`), and each unique node is computed once, parents before children. SGLang's
own radix tree is not changed.

SGLang offers each waiting request to the batch. If the request shares tokens with one that is
already in the batch, it either reads them in the same forward, so that its prefix grows by KV that
the other request writes, or it waits until they are in the radix tree, for one step where KV is
published once its forward has been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.request import is_shareable, state_of

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


class BatchTree(Generic[Owner]):
    """Holds the unique tokens that one batch computes, while it is built.

    Time and memory are linear in its tokens, which are only the uncached ones.

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
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        common = int(different[0]) if len(different) else length
        return common - common % self._page


@dataclass(frozen=True, slots=True)
class _Follower:
    """A request whose tokens from ``start`` to ``end`` the request ``owner`` of its batch computes.

    If nothing is shared, ``start`` equals ``end``.
    """

    start: int
    end: int
    owner: Any


class SharedPrefill:
    """Decides what the requests of a prefill batch share, while SGLang builds the batch.

    Args:
        page_size: tokens in a KV page.
        within_forward: whether a request can read KV that another of its batch writes.

    Attributes:
        avoided: tokens that requests would have computed if another request did not.
    """

    def __init__(self, page_size: int, *, within_forward: bool) -> None:
        self._within_forward = within_forward
        self._tree: BatchTree[Any] = BatchTree(page_size)
        self._entered = 0
        self._starts: dict[Any, int] = {}
        self._followers: dict[Any, _Follower] = {}
        self.avoided = 0

    def admit(self, original: Callable[[], Any], adder: Any, req: Any) -> Any:
        """Add a request to the batch with what it shares, or let it wait for the next batch.

        Args: original: ``PrefillAdder.add_one_req``, which has matched the request's prefix.
        """
        is_full = adder.rem_chunk_tokens is not None and adder.rem_chunk_tokens <= 0
        if not is_shareable(req) or is_full:
            return original()
        self._enter(adder.can_run_list)
        start = RELEASE.cached_tokens(req)
        tokens = RELEASE.tokens(req, start, RELEASE.longest_prefix(req))
        shared = self._tree.match(_anchor(req, start), tokens)
        count = shared.take(self._within_forward)
        if count is None and self._may_wait(req, start):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.CONTINUE
        if count is None:
            count = shared.now if self._within_forward else 0
        return self._take(original, adder, req, _Follower(start, start + count, shared.owner))

    def _take(self, original: Callable[[], Any], adder: Any, req: Any, follower: _Follower) -> Any:
        if follower.end > follower.start:
            RELEASE.grow_prefix(req, follower.end - follower.start)
        result = original()
        if not adder.can_run_list or adder.can_run_list[-1] is not req:
            RELEASE.shrink_prefix(req, follower.start)
            return result
        self._starts[req] = follower.start
        if follower.end > follower.start:
            self._followers[req] = follower
        # The prefix may have been evicted while the request waited, so the smaller length counts.
        first_wait = state_of(req).first_wait
        waited_from = follower.start if first_wait is None else min(first_wait, follower.start)
        self.avoided += follower.end - waited_from
        return result

    def _may_wait(self, req: Any, start: int) -> bool:
        """Return whether a request may wait; it may not if the last wait did not help."""
        state = state_of(req)
        if state.last_wait == start:
            return False
        if state.first_wait is None:
            state.first_wait = start
        state.last_wait = start
        return True

    def _enter(self, taken: Sequence[Any]) -> None:
        """Add the requests that have joined the batch since the last call."""
        for req in taken[self._entered :]:
            if is_shareable(req):
                start = self._starts.get(req, RELEASE.cached_tokens(req))
                computed = RELEASE.computed_until(req) - start
                tokens = RELEASE.tokens(req, start, None)
                self._tree.add(req, _anchor(req, start), tokens, computed)
        self._entered = len(taken)

    def settle(self, scheduler: Any, batch: Any) -> None:
        """Give followers in the built batch their KV.

        This goes through the batch in its order, so that an owner is in the radix tree before its
        followers.
        """
        owners = {follower.owner for follower in self._followers.values()}
        for req in batch.reqs if owners else ():
            follower = self._followers.get(req)
            if follower is not None:
                RELEASE.adopt(scheduler, req, follower.start, follower.end)
            if req in owners:
                RELEASE.publish(scheduler, req)


class QueuedTokens:
    """Counts the tokens that waiting requests have to compute, each shared token once.

    A request's count stays right when the request before it, with which it shares tokens, has been
    computed, because the shared tokens are then in the radix tree.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self.forget()

    def forget(self) -> None:
        """Forget the tokens counted so far, because requests leave the queue now."""
        self._tree: BatchTree[str] = BatchTree(self._page)

    def count(self, tree_cache: Any, queue: Sequence[Any], enough: int) -> int:
        """Return the number of tokens, or a part that is ``enough``; match each request once."""
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
        tokens = np.array(req.origin_input_ids + req.output_ids, dtype=np.int64)
        start = len(tokens) - uncached
        anchor = _anchor(req, start)
        shared = self._tree.match(anchor, tokens[start:]).now
        self._tree.add(req.rid, anchor, tokens[start:], uncached)
        return uncached - shared


def _anchor(req: Any, start: int) -> Hashable:
    """Return a value that identifies where a request's cached prefix ends in the radix tree."""
    return (RELEASE.namespace(req), req.last_node, start)
