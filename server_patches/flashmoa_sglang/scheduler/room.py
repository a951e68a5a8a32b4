"""How much of the KV pool increments of prompt streams may take: what no request needs."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil
from typing import Any

from flashmoa_sglang import releases
from flashmoa_sglang.messages import RoomAgain, is_increment, mark_of

# SGLang reserves at most this many output tokens when it admits a request.
_RESERVED_OUTPUT = 4096
# Of the KV pool, what increments leave free for requests that are still to come, unless one
# stream is all there is.
_HEADROOM = 1 / 16


def refused(scheduler: Any, running: Any) -> set[int]:
    """Increments in the queue that find no room; positions.

    Their streams are remembered, and told by :func:`offer` when there is room for them.
    """
    side, queue = scheduler.flashmoa, scheduler.waiting_queue
    increments = [(position, req) for position, req in enumerate(queue) if is_increment(req)]
    if not increments:
        return set()
    left = _left(scheduler, running, _streams_of(queue))
    without = set[int]()
    for position, req in increments:
        needs = _uncached(scheduler.tree_cache, req)
        if needs <= left and not getattr(req, "flashmoa_found_no_room", False):
            left -= needs
            continue
        without.add(position)
        stream = mark_of(req).stream
        if not side.pins.is_released(stream):
            # Its cached prefix is evictable, too, where it was told that there is no room.
            side.refused[stream] = needs if needs > left else len(req.origin_input_ids)
    return without


def offer(scheduler: Any, running: Any) -> None:
    """Tell streams that were refused, in that order, once there is room for what they need.

    Without this each of them would have to ask again and again, and each question carries a
    whole prompt. What does not fit keeps nobody behind it waiting.
    """
    waiting: dict[str, int] = scheduler.flashmoa.refused
    if not waiting:
        return
    queue, tree = scheduler.waiting_queue, scheduler.tree_cache
    left = _left(scheduler, running, _streams_of(queue).union(waiting))
    left -= sum(_uncached(tree, req) for req in queue if is_increment(req))
    served: list[str] = []
    for stream, tokens in waiting.items():
        if tokens <= left:
            left -= tokens
            served.append(stream)
    if not served:
        return
    for stream in served:
        del waiting[stream]
    releases.to_tokenizer(scheduler, releases.wrapped(RoomAgain(tuple(served))))


def make(scheduler: Any, running: Any) -> None:
    """Have streams give way beforehand to the largest request that waits.

    For priority preemption: SGLang looks for running requests to preempt before it asks whether
    there is room, and KV that streams hold counts as used there.
    """
    needs = [_need(scheduler, req) for req in scheduler.waiting_queue if not is_increment(req)]
    if needs:
        scheduler.flashmoa.pins.make_room(max(needs) + _promised(scheduler, running))


def asked_of_pool(req: Any, page: int) -> int:
    """KV slots that SGLang asks for before it admits a request, in tokens."""
    left = len(req.origin_input_ids) + len(req.output_ids) - releases.cached_tokens(req)
    return left + _output_left(req) + page


def left_of_chunked(scheduler: Any) -> int:
    """Tokens of a prompt that is cut into chunks which are still to be computed; in whole pages."""
    req, page = scheduler.chunked_req, scheduler.page_size
    if req is None:
        return 0
    left = len(req.origin_input_ids) + len(req.output_ids) - releases.computed_until(req)
    return (left // page + 2) * page


def _streams_of(queue: Any) -> set[str | None]:
    return {mark.stream for req in queue if (mark := mark_of(req))}


def _uncached(tree_cache: Any, req: Any) -> int:
    # Once is enough: it changes little while the request waits.
    if not hasattr(req, "flashmoa_uncached"):
        req.flashmoa_uncached = releases.uncached(tree_cache, req)
    return req.flashmoa_uncached


def _left(scheduler: Any, running: Any, streams: Collection[str | None]) -> int:
    """KV slots for increments of these streams: what requests leave of the pool, in tokens."""
    room = releases.free_tokens(scheduler.tree_cache) - _promised(scheduler, running)
    room -= sum(_need(scheduler, req) for req in scheduler.waiting_queue if not is_increment(req))
    if running.reqs or len(scheduler.flashmoa.pins.streams.union(streams)) > 1:
        room -= int(scheduler.max_total_num_tokens * _HEADROOM)
    return room


def _promised(scheduler: Any, running: Any) -> int:
    """KV slots that SGLang gives to nobody else: for answers that are being written, as long as
    it expects them to become, and for what is left of a prompt that is cut into chunks."""
    answers = sum(_output_left(req) * releases.kept_free(scheduler, req) for req in running.reqs)
    chunked = scheduler.chunked_req
    rest = left_of_chunked(scheduler) + (_output_left(chunked) if chunked is not None else 0)
    # With SGLang's own mixed chunk each of them has a token in the batch, too.
    return ceil(answers) + rest + len(running.reqs)


def _need(scheduler: Any, req: Any) -> int:
    """KV slots a waiting request takes from what is free or evictable, in tokens, at most.

    SGLang asks for more than it takes: a page, and something left.
    """
    mark, more = mark_of(req), _output_left(req) + scheduler.page_size + 1
    if mark is not None and mark.stream in scheduler.flashmoa.pins:
        return releases.uncached(scheduler.tree_cache, req) + more
    # Its cached prefix may be evictable now, and is not any more once it runs.
    return len(req.origin_input_ids) + len(req.output_ids) + more


def _output_left(req: Any) -> int:
    left = (req.sampling_params.max_new_tokens or 0) - len(req.output_ids)
    return min(max(0, left), _RESERVED_OUTPUT)
