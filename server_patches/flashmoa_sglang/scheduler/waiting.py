"""The queue of waiting requests: dropped, held, refused and ordered before each prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

from flashmoa_sglang import releases
from flashmoa_sglang.messages import NO_ROOM, mark_of
from flashmoa_sglang.scheduler.gathering import IDLE_SLEEP, IDLE_STEP
from flashmoa_sglang.scheduler.scheduling import Job, Waiting, held_back, shortest_first, superseded

# SGLang reserves at most this many output tokens when it admits a request.
_RESERVED_OUTPUT = 4096
# Of the KV pool, what increments leave free for requests that are still to come, unless one
# stream is all there is.
_HEADROOM = 1 / 16
# Matching a prompt with the radix tree takes time; further down the queue a guess will do.
_MATCHED_JOBS = 128


def prepare(scheduler: Any, running: Any) -> list[Any]:
    """Drop, make room and hold; the requests that sit this step out."""
    queue = scheduler.waiting_queue
    marked = [(mark, req) for req in queue if (mark := mark_of(req))]
    for req in (req for mark, req in marked if not mark.final):
        releases.keep_kv(req)
    streams = bool(marked)
    if streams:
        _drop(scheduler, superseded(_view(queue)), "a longer request of its stream is queued")
    if scheduler.flashmoa.pins or streams:
        _make_room(scheduler, running)
    if not streams:
        return []
    queue = scheduler.waiting_queue
    positions = held_back(_view(queue))
    held = [queue[position] for position in positions]
    for req in held:
        req.flashmoa_held = getattr(req, "flashmoa_held", 0) + 1
    scheduler.waiting_queue = [
        req for position, req in enumerate(queue) if position not in positions
    ]
    return held


def gathers(scheduler: Any, running: Any) -> bool:
    """Whether all of the queue waits in this step, so that a later forward hides transfers.

    Where nothing runs meanwhile, the scheduler sleeps for most of the step.
    """
    side, queue = scheduler.flashmoa, scheduler.waiting_queue
    if side.gathering is None or scheduler.chunked_req is not None:
        return False
    decoding = releases.decoding(running)
    step = side.costs.decode(decoding) if decoding else IDLE_STEP
    tokens = side.queued.count(scheduler.tree_cache, queue, side.gathering.tokens)
    room = scheduler.max_running_requests - len(running.reqs)
    if not side.gathering.holds([req.rid for req in queue], tokens, room, step):
        side.queued.forget()
        return False
    # Results of the last batch, if there was one, are not to wait for this.
    if not decoding and not scheduler.last_batch:
        time.sleep(IDLE_SLEEP)
    return True


def look_in(scheduler: Any) -> None:
    """What SGLang does before each prefill batch, for a step in which none is built.

    Requests whose grammar is compiled by now join the queue: nobody else puts them there.
    """
    grammars = scheduler.grammar_manager
    if grammars.has_waiting_grammars():
        for req in grammars.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
    releases.look_after_host_cache(scheduler)


@contextmanager
def one_at_a_time(scheduler: Any) -> Iterator[None]:
    """Only the first waiting request may join, and only if none is chunked already.

    Looking at each of many in every decode step would cost more than the step.
    """
    queue = scheduler.waiting_queue
    first = 0 if scheduler.chunked_req is not None else 1
    scheduler.waiting_queue = queue[:first]
    try:
        yield
    finally:
        scheduler.waiting_queue = scheduler.waiting_queue + queue[first:]


def _view(queue: list[Any]) -> list[Waiting]:
    return [_waiting(req) for req in queue]


def _waiting(req: Any) -> Waiting:
    mark = mark_of(req)
    if mark is None:
        return Waiting()
    return Waiting(
        stream=mark.stream,
        increment=is_increment(req),
        late=mark.late if mark.final else None,
        length=len(req.origin_input_ids),
        held=getattr(req, "flashmoa_held", 0),
    )


def _drop(scheduler: Any, positions: set[int], reason: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    queue = scheduler.waiting_queue
    for position in positions:
        req = queue[position]
        releases.to_tokenizer(scheduler, AbortReq(rid=req.rid, abort_message=reason), req)
        releases.let_go(scheduler, req)
    scheduler.waiting_queue = [
        req for position, req in enumerate(queue) if position not in positions
    ]


def is_increment(req: Any) -> bool:
    mark = mark_of(req)
    return mark is not None and mark.stream is not None and not mark.final


def _make_room(scheduler: Any, running: Any) -> None:
    """Streams give way before any request waits for memory, and take only what is left."""
    tree, side = scheduler.tree_cache, scheduler.flashmoa
    queue = scheduler.waiting_queue
    promised = _promised(scheduler, running)
    real = [_need(scheduler, req) for req in queue if not is_increment(req)]
    if real and side.pins.make_room(max(real) + promised):
        running.batch_is_full = False
    room = releases.free_tokens(tree) - promised - sum(real)
    streams = {mark.stream for req in queue if (mark := mark_of(req))}
    if running.reqs or len(side.pins.streams | streams) > 1:
        room -= int(scheduler.max_total_num_tokens * _HEADROOM)
    refused = set[int]()
    for position, req in enumerate(queue):
        if is_increment(req):
            # Once is enough: it changes little while the request waits.
            if not hasattr(req, "flashmoa_uncached"):
                req.flashmoa_uncached = releases.uncached(tree, req)
            room -= req.flashmoa_uncached
            if room < 0:
                refused.add(position)
    if refused:
        _drop(scheduler, refused, NO_ROOM)


def _promised(scheduler: Any, running: Any) -> int:
    """KV slots that SGLang gives to nobody else: for answers that are being written, as long as
    it expects them to become, and for what is left of a prompt that is cut into chunks."""
    answers = sum(_output_left(req) * releases.kept_free(scheduler, req) for req in running.reqs)
    chunked = scheduler.chunked_req
    rest = left_of_chunked(scheduler) + (_output_left(chunked) if chunked is not None else 0)
    # With SGLang's own mixed chunk each of them has a token in the batch, too.
    return ceil(answers) + rest + len(running.reqs)


def left_of_chunked(scheduler: Any) -> int:
    """Tokens of a prompt that is cut into chunks which are still to be computed; in whole pages."""
    req, page = scheduler.chunked_req, scheduler.page_size
    if req is None:
        return 0
    left = len(req.origin_input_ids) + len(req.output_ids) - releases.computed_until(req)
    return (left // page + 2) * page


def _need(scheduler: Any, req: Any) -> int:
    """KV slots a request takes from what is free or evictable, in tokens.

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


def order_queue(_result: None, policy: Any, queue: list[Any], *_args: Any, **_kwargs: Any) -> None:
    """After ``SchedulePolicy.calc_priority``: shortest job first, where that was asked for."""
    side = getattr(policy.tree_cache, "flashmoa", None)
    if side is None or side.options.schedule != "sjf":
        return
    jobs = [
        _job(policy, side, req, matched=position < _MATCHED_JOBS)
        for position, req in enumerate(queue)
    ]
    queue[:] = [queue[position] for position in shortest_first(jobs, side.costs)]


def _job(policy: Any, side: Any, req: Any, *, matched: bool) -> Job:
    if not hasattr(req, "flashmoa_queued_at"):
        req.flashmoa_queued_at = side.work
    total = len(req.origin_input_ids) + len(req.output_ids)
    if matched:
        req.flashmoa_uncached = releases.uncached(policy.tree_cache, req)
    mark = mark_of(req)
    expected = mark.expected_output if mark is not None else None
    output = req.sampling_params.max_new_tokens if expected is None else expected
    return Job(
        uncached=getattr(req, "flashmoa_uncached", total),
        output=max(0, (output or 0) - len(req.output_ids)),
        queued_at=req.flashmoa_queued_at,
        priority=policy.priority_sign * req.priority if policy.enable_priority_scheduling else 0,
    )
