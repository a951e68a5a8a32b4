"""The intra-turn prefix cache at work: requests that join one prefill batch.

SGLang asks for each waiting request whether the batch can take it. Here a request that
shares tokens with one that the batch has taken already either reads them from there (its
prefix grows by KV that is written in the same forward) or waits until they are in the radix
tree, which is as soon as the batch is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashmoa_sglang import releases
from flashmoa_sglang.scheduler.intra_turn import Turn

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True, slots=True)
class _Follower:
    """Its tokens from ``start`` to ``end`` are computed by ``owner``, in the same batch."""

    start: int
    end: int
    owner: Any


class SharedBatch:
    """A prefill batch being put together.

    Args:
        within_forward: the attention backend writes the whole batch's KV before it reads.
    """

    def __init__(self, page_size: int, *, within_forward: bool) -> None:
        self._within_forward = within_forward
        self._turn: Turn[Any] = Turn(page_size)
        self._entered = 0
        self._starts: dict[Any, int] = {}
        self._followers: dict[Any, _Follower] = {}
        # Tokens that a request would have computed and another one does.
        self.avoided = 0

    def admit(self, original: Callable[[], Any], adder: Any, req: Any) -> Any:
        """Around ``PrefillAdder.add_one_req``, after SGLang matched the request's prefix."""
        if not releases.is_shareable(req):
            return original()
        self._enter(adder.can_run_list)
        start = releases.cached_tokens(req)
        sought = releases.tokens(req, start, releases.longest_prefix(req))
        shared = self._turn.match(_anchor(req, start), sought)
        taken = shared.take(self._within_forward)
        if taken is None and self._may_wait(req, start):
            return releases.go_on()
        if taken is None:
            taken = shared.now if self._within_forward else 0
        return self._take(original, adder, req, _Follower(start, start + taken, shared.owner))

    def _take(self, original: Callable[[], Any], adder: Any, req: Any, place: _Follower) -> Any:
        if place.end > place.start:
            releases.grow_prefix(req, place.end - place.start)
        result = original()
        if not adder.can_run_list or adder.can_run_list[-1] is not req:
            releases.shrink_prefix(req, place.start)
            return result
        self._starts[req] = place.start
        if place.end > place.start:
            self._followers[req] = place
        # The prefix may have been evicted while the request waited.
        waited_at = getattr(req, "flashmoa_waited_at", place.start)
        self.avoided += place.end - min(waited_at, place.start)
        return result

    def _may_wait(self, req: Any, start: int) -> bool:
        """Not twice at one place: what it waits for did not come."""
        if getattr(req, "flashmoa_waited_at", None) is None:
            req.flashmoa_waited_at = start
        elif req.flashmoa_waits_at == start:
            return False
        req.flashmoa_waits_at = start
        return True

    def _enter(self, taken: list[Any]) -> None:
        """Put what the batch has taken since the last time into the tree."""
        for req in taken[self._entered :]:
            if releases.is_shareable(req):
                start = self._starts.get(req, releases.cached_tokens(req))
                computed = releases.computed_until(req) - start
                tokens = releases.tokens(req, start, None)
                self._turn.add(req, _anchor(req, start), tokens, computed)
        self._entered = len(taken)

    def settle(self, scheduler: Any, batch: Any, publish: Callable[[Any], bool]) -> None:
        """The batch is built: give followers their KV, publish what others wait for.

        In the order of the batch, so that an owner is in the radix tree before those that
        follow it. ``publish``: whether a request is to be published for another reason.
        """
        owners = {follower.owner for follower in self._followers.values()}
        for req in batch.reqs:
            follower = self._followers.get(req)
            if follower is not None:
                releases.adopt(scheduler, req, follower.start, follower.end)
            if req in owners or publish(req):
                releases.publish(scheduler, req)


class QueuedTokens:
    """What waiting requests have to compute, each shared token counted once.

    What a request shares with one that went before it is in the radix tree then: its own count
    stays right.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self.forget()

    def forget(self) -> None:
        """Whose tokens they were: some of the queue go now."""
        self._turn: Turn[str] = Turn(self._page)

    def count(self, tree_cache: Any, queue: Sequence[Any], enough: int) -> int:
        """In all, or once they are ``enough``; each request is looked up once."""
        total = 0
        for req in queue:
            if not hasattr(req, "flashmoa_own_tokens"):
                req.flashmoa_own_tokens = self._own(tree_cache, req)
            total += req.flashmoa_own_tokens
            if total >= enough:
                break
        return total

    def _own(self, tree_cache: Any, req: Any) -> int:
        uncached = releases.uncached(tree_cache, req)
        if not releases.is_shareable(req):
            return uncached
        tokens = np.array(req.origin_input_ids + req.output_ids, dtype=np.int64)
        start = len(tokens) - uncached
        anchor = _anchor(req, start)
        shared = self._turn.match(anchor, tokens[start:]).now
        self._turn.add(req.rid, anchor, tokens[start:], uncached)
        return uncached - shared


def _anchor(req: Any, start: int) -> Hashable:
    return (releases.namespace(req), releases.last_node(req), start)
