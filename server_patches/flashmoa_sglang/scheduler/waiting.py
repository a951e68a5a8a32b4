"""The queue of waiting requests: dropped, held, refused and ordered before each prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashmoa_sglang import releases
from flashmoa_sglang.messages import NO_ROOM, is_increment, mark_of
from flashmoa_sglang.scheduler import room
from flashmoa_sglang.scheduler.gathering import IDLE_SLEEP, IDLE_STEP
from flashmoa_sglang.scheduler.scheduling import Job, Waiting, held_back, shortest_first, superseded

# Matching a prompt with the radix tree takes time; further down the queue a guess will do.
_MATCHED_JOBS = 128


def prepare(scheduler: Any, running: Any) -> list[Any]:
    """Drop increments that are pointless or have no room, and hold requests back.

    Returns: the requests that sit this step out, which are not in the queue meanwhile.
    """
    queue = scheduler.waiting_queue
    marked = [(mark, req) for req in queue if (mark := mark_of(req))]
    if not marked:
        return []
    for req in (req for mark, req in marked if not mark.final):
        releases.keep_kv(req)
    _drop(scheduler, superseded(_view(queue)), "a longer request of its stream is queued")
    _drop(scheduler, room.refused(scheduler, running), NO_ROOM)
    # Behind an increment that finds no room, SGLang would look at nobody.
    queue = sorted(scheduler.waiting_queue, key=is_increment)
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
    if not positions:
        return
    from sglang.srt.managers.io_struct import AbortReq

    queue = scheduler.waiting_queue
    for position in positions:
        req = queue[position]
        releases.to_tokenizer(scheduler, AbortReq(rid=req.rid, abort_message=reason), req)
        releases.let_go(scheduler, req)
    scheduler.waiting_queue = [
        req for position, req in enumerate(queue) if position not in positions
    ]


def order_queue(
    _result: None, policy: Any, waiting_queue: list[Any], *_args: Any, **_kwargs: Any
) -> None:
    """After ``SchedulePolicy.calc_priority``: shortest job first, where that was asked for."""
    side = getattr(policy.tree_cache, "flashmoa", None)
    if side is None or side.options.schedule != "sjf":
        return
    jobs = [
        _job(policy, side, req, matched=position < _MATCHED_JOBS)
        for position, req in enumerate(waiting_queue)
    ]
    waiting_queue[:] = [waiting_queue[position] for position in shortest_first(jobs, side.costs)]


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
