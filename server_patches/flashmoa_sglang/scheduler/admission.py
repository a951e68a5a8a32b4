"""Room in the KV pool: requests come first, and increments of streams get what they leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import RoomAvailable
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.pins import available_tokens
from flashmoa_sglang.scheduler.request import (
    is_increment,
    output_left,
    state_of,
    total_tokens,
    uncached_tokens,
)

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState

# The share of the KV pool that increments leave free for requests to come, unless there is only one
# stream and no request.
_HEADROOM = 1 / 16


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a request to a batch, with the tokens that it shares; unpin streams if it has no room.

    Wraps ``PrefillAdder.add_one_req``, where SGLang counts what the requests before this one in the
    batch take. So any number of requests find the room that streams hold.
    """
    state: SchedulerState | None = getattr(adder.tree_cache, "flashmoa", None)
    if state is None:
        return original(adder, req, *args, **kwargs)
    shared = state.shared

    def ask() -> Any:
        if shared is None:
            return original(adder, req, *args, **kwargs)
        return shared.admit(lambda: original(adder, req, *args, **kwargs), adder, req)

    def joined() -> bool:
        return bool(adder.can_run_list) and adder.can_run_list[-1] is req

    result = ask()
    if is_increment(req) and lacks_room(result):
        state.lack_concerns_streams = True
        # It is dropped before the next batch, so that it does not block requests after it.
        state_of(req).found_no_room = not joined()
        return result
    while lacks_room(result) and state.pins.give_way():
        if joined():
            result = adder.budget_state()
            continue
        # SGLang may count how often a request found no room. So streams give way until it will find
        # some, before it is admitted again.
        needs = _asked_of_pool(req, adder.page_size)
        while adder.rem_total_tokens <= needs and state.pins.give_way():
            pass
        result = ask()
    return result


def lacks_room(result: Any) -> bool:
    """Return whether ``PrefillAdder.add_one_req`` says that the KV pool is short."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return result == AddReqResult.NO_TOKEN


def increments_without_room(scheduler: Any, running: Any) -> set[int]:
    """Return the positions of queued increments that find no room in the KV pool.

    :func:`offer_room` notifies their streams when there is room.
    """
    state: SchedulerState = scheduler.flashmoa
    queue = scheduler.waiting_queue
    left, refused = None, set[int]()
    for position, req in enumerate(queue):
        stream = state_of(req).increment_of
        if stream is None:
            continue
        if left is None:
            left = _left_for_streams(scheduler, running, _streams_of(queue))
        needs = uncached_tokens(scheduler.tree_cache, req)
        if needs <= left and not state_of(req).found_no_room:
            left -= needs
            continue
        refused.add(position)
        if not state.pins.is_released(stream):
            # If it was SGLang that found no room, the stream's cached prefix counted as evictable
            # here, but is needed. So the whole prompt must find room.
            state.refused[stream] = needs if needs > left else len(req.origin_input_ids)
    return refused


def offer_room(scheduler: Any, running: Any) -> None:
    """Notify streams that were refused, in that order, when there is room for their increments.

    Without this they would have to send increments again and again, each with a whole prompt. A
    stream that needs more than there is does not hold up the streams after it.
    """
    waiting: dict[str, int] = scheduler.flashmoa.refused
    if not waiting:
        return
    queue, tree = scheduler.waiting_queue, scheduler.tree_cache
    left = _left_for_streams(scheduler, running, _streams_of(queue).union(waiting))
    left -= sum(uncached_tokens(tree, req) for req in queue if is_increment(req))
    served: list[str] = []
    for stream, tokens in waiting.items():
        if tokens <= left:
            left -= tokens
            served.append(stream)
    for stream in served:
        del waiting[stream]
    if served:
        RELEASE.to_tokenizer(scheduler, RoomAvailable(tuple(served)))


def make_room(scheduler: Any, running: Any) -> None:
    """Unpin streams until the largest waiting request has room.

    This is for priority preemption. SGLang looks for running requests to preempt before it finds
    out whether there is room, and counts KV that streams hold as used.
    """
    needs = [_need(scheduler, req) for req in scheduler.waiting_queue if not is_increment(req)]
    if needs:
        scheduler.flashmoa.pins.make_room(max(needs) + _promised(scheduler, running))


def left_of_chunked(scheduler: Any) -> int:
    """Return how many tokens of the chunked prompt are still to be computed, in whole pages."""
    req, page = scheduler.chunked_req, scheduler.page_size
    if req is None:
        return 0
    left = total_tokens(req) - RELEASE.computed_until(req)
    return (left // page + 2) * page


def _streams_of(queue: Sequence[Any]) -> set[str]:
    return {stream for req in queue if (stream := state_of(req).stream) is not None}


def _left_for_streams(scheduler: Any, running: Any, streams: Collection[str]) -> int:
    """Return the KV slots that requests leave for increments of these streams, in tokens."""
    room = available_tokens(scheduler.tree_cache) - _promised(scheduler, running)
    room -= sum(_need(scheduler, req) for req in scheduler.waiting_queue if not is_increment(req))
    if running.reqs or len(scheduler.flashmoa.pins.streams.union(streams)) > 1:
        room -= int(scheduler.max_total_num_tokens * _HEADROOM)
    return room


def _promised(scheduler: Any, running: Any) -> int:
    """Return the KV slots that SGLang keeps for running requests, in tokens.

    They are for the expected rest of the answers that are being decoded, and for the rest of a
    prompt that is cut into chunks.
    """
    answers = sum(
        output_left(req) * RELEASE.reserved_output(scheduler, req) for req in running.reqs
    )
    chunked = scheduler.chunked_req
    rest = left_of_chunked(scheduler) + (output_left(chunked) if chunked is not None else 0)
    # With SGLang's mixed chunk each running request has a token in the batch, too.
    return ceil(answers) + rest + len(running.reqs)


def _need(scheduler: Any, req: Any) -> int:
    """Return how many free or evictable KV slots a waiting request needs at most, in tokens.

    SGLang requires more than the request takes: a page, and at least one slot that stays free.
    """
    more = output_left(req) + scheduler.page_size + 1
    if state_of(req).stream in scheduler.flashmoa.pins:
        return RELEASE.uncached_tokens(scheduler.tree_cache, req) + more
    # The request's cached prefix may be evictable now, but is not any more once the request runs.
    return total_tokens(req) + more


def _asked_of_pool(req: Any, page: int) -> int:
    """Return the number of KV slots that SGLang requires to admit a request."""
    return total_tokens(req) - RELEASE.cached_tokens(req) + output_left(req) + page


def check_decode_memory(
    original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any
) -> bool:
    """Unpin streams before a decode is retracted; wraps ``ScheduleBatch.check_decode_mem``."""
    fits = original(batch, *args, **kwargs)
    state: SchedulerState | None = getattr(batch.tree_cache, "flashmoa", None)
    if state is None:
        return fits
    state.work += state.costs.decode_weight
    state.pause = max(0, state.pause - 1)
    if fits or not state.pins:
        return fits
    state.pins.make_room(batch.new_tokens_required_next_decode(*args, **kwargs))
    return original(batch, *args, **kwargs)
