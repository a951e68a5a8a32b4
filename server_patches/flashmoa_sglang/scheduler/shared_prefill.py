"""The intra-turn prefix cache at work: requests that join one prefill batch.

SGLang asks for each waiting request whether the batch can take it. Here a request that
shares tokens with one that the batch has taken already either reads them from there (its
prefix grows by KV that is written in the same forward) or waits until they are in the radix
tree, which is as soon as the batch is built.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.intra_turn import Turn
from flashmoa_sglang.scheduler.request import is_shareable, state_of


@dataclass(frozen=True, slots=True)
class _Follower:
    """Its tokens from ``start`` to ``end`` are computed by ``owner``, in the same batch."""

    start: int
    end: int
    owner: Any


class SharedPrefill:
    """A prefill batch being put together.

    Args:
        page_size: tokens per KV page.
        within_forward: the attention backend writes the whole batch's KV before it reads.

    Attributes:
        avoided: tokens that a request would have computed and another one does.
    """

    def __init__(self, page_size: int, *, within_forward: bool) -> None:
        self._within_forward = within_forward
        self._turn: Turn[Any] = Turn(page_size)
        self._entered = 0
        self._starts: dict[Any, int] = {}
        self._followers: dict[Any, _Follower] = {}
        self.avoided = 0

    def admit(self, original: Callable[[], Any], adder: Any, req: Any) -> Any:
        """Decide what a request takes from the batch, waits for, or computes itself.

        Around ``PrefillAdder.add_one_req``, after SGLang matched the request's prefix.
        """
        if not is_shareable(req):
            return original()
        self._enter(adder.can_run_list)
        start = RELEASE.cached_tokens(req)
        sought = RELEASE.tokens(req, start, RELEASE.longest_prefix(req))
        shared = self._turn.match(_anchor(req, start), sought)
        taken = shared.take(self._within_forward)
        if taken is None and self._may_wait(req, start):
            return _not_this_one()
        if taken is None:
            taken = shared.now if self._within_forward else 0
        return self._take(original, adder, req, _Follower(start, start + taken, shared.owner))

    def _take(self, original: Callable[[], Any], adder: Any, req: Any, place: _Follower) -> Any:
        if place.end > place.start:
            RELEASE.grow_prefix(req, place.end - place.start)
        result = original()
        if not adder.can_run_list or adder.can_run_list[-1] is not req:
            RELEASE.shrink_prefix(req, place.start)
            return result
        self._starts[req] = place.start
        if place.end > place.start:
            self._followers[req] = place
        # The prefix may have been evicted while the request waited.
        first_wait = state_of(req).first_wait
        waited_from = place.start if first_wait is None else min(first_wait, place.start)
        self.avoided += place.end - waited_from
        return result

    def _may_wait(self, req: Any, start: int) -> bool:
        """Return whether a request may wait: not twice at one place, where nothing came."""
        state = state_of(req)
        if state.last_wait == start:
            return False
        if state.first_wait is None:
            state.first_wait = start
        state.last_wait = start
        return True

    def _enter(self, taken: Sequence[Any]) -> None:
        """Put what the batch has taken since the last time into the tree."""
        for req in taken[self._entered :]:
            if is_shareable(req):
                start = self._starts.get(req, RELEASE.cached_tokens(req))
                computed = RELEASE.computed_until(req) - start
                tokens = RELEASE.tokens(req, start, None)
                self._turn.add(req, _anchor(req, start), tokens, computed)
        self._entered = len(taken)

    def settle(self, scheduler: Any, batch: Any, publish: Callable[[Any], bool]) -> None:
        """Give followers in the built batch their KV, and publish what others wait for.

        In the order of the batch, so that an owner is in the radix tree before those that
        follow it. ``publish``: whether a request is to be published for another reason.
        """
        owners = {follower.owner for follower in self._followers.values()}
        for req in batch.reqs:
            follower = self._followers.get(req)
            if follower is not None:
                adopt(scheduler, req, follower.start, follower.end)
            if req in owners or publish(req):
                RELEASE.publish(scheduler, req)


class QueuedTokens:
    """What waiting requests have to compute, each shared token counted once.

    What a request shares with one that went before it is in the radix tree then: its own count
    stays right.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self.forget()

    def forget(self) -> None:
        """Forget whose tokens they were: some of the queue go now."""
        self._turn: Turn[str] = Turn(self._page)

    def count(self, tree_cache: Any, queue: Sequence[Any], enough: int) -> int:
        """Return all of them, or some once they are ``enough``; each request is looked up once."""
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
        shared = self._turn.match(anchor, tokens[start:]).now
        self._turn.add(req.rid, anchor, tokens[start:], uncached)
        return uncached - shared


def adopt(scheduler: Any, req: Any, start: int, end: int) -> None:
    """Point a request of a built batch to KV that has been published meanwhile.

    As if it had matched that when the batch was built: table row, prefix and lock.

    Raises: AssertionError where that KV is not in the radix tree.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    tree = scheduler.tree_cache
    match = tree.match_prefix(MatchPrefixParams(key=RELEASE.radix_key(req, end)))
    slots = match.device_indices
    if len(slots) != end:
        raise AssertionError(f"{len(slots)} of {end} shared tokens are in the radix tree")
    scheduler.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), slots[start:])
    req.prefix_indices = slots
    req.cache_protected_len = end
    tree.dec_lock_ref(req.last_node)
    tree.inc_lock_ref(match.last_device_node)
    req.last_node = match.last_device_node


def _not_this_one() -> Any:
    """Return the answer of ``add_one_req`` for: not this request, but ask for others."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def _anchor(req: Any, start: int) -> Hashable:
    """Name the point at which a request's cached prefix ends in the radix tree."""
    return (RELEASE.namespace(req), req.last_node, start)
