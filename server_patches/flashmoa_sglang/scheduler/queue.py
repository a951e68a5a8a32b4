"""Drops, holds back and orders the waiting requests before each prefill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import NO_ROOM
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.admission import increments_without_room
from flashmoa_sglang.scheduler.policy import (
    IDLE_SLEEP,
    IDLE_STEP,
    Job,
    WaitingRequest,
    choose_held_back,
    find_superseded,
    shortest_first,
)
from flashmoa_sglang.scheduler.request import is_increment, state_of, total_tokens

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState

# Matching a prompt with the radix tree takes time. After this many requests of the queue, the last
# known number of uncached tokens is good enough.
_MATCHED_JOBS = 128


def prepare(scheduler: Any, running: Any) -> list[Any]:
    """Drop increments that are pointless or have no room, and take requests to hold back out.

    Returns: the requests that are held back in this step, to be put into the queue again after it.
    """
    marked = [(mark, req) for req in scheduler.waiting_queue if (mark := state_of(req).mark)]
    if not marked:
        return []
    for mark, req in marked:
        if not mark.final:
            keep_kv(req)
    pointless = find_superseded([_describe(req) for req in scheduler.waiting_queue])
    _drop(scheduler, pointless, "a longer request of its stream is queued")
    _drop(scheduler, increments_without_room(scheduler, running), NO_ROOM)
    # Increments come last: after one that finds no room, SGLang would consider no other request.
    queue = sorted(scheduler.waiting_queue, key=is_increment)
    positions = choose_held_back([_describe(req) for req in queue])
    held = [queue[position] for position in positions]
    for req in held:
        state_of(req).held += 1
    scheduler.waiting_queue = _without(queue, positions)
    return held


def waits_for_saturation(scheduler: Any, running: Any, decoding: int) -> bool:
    """Decide whether the whole queue waits in this step, so that a later forward hides transfers.

    If it waits and no request decodes, sleep for most of the step.
    """
    state: SchedulerState = scheduler.flashmoa
    gate, queue = state.saturation_gate, scheduler.waiting_queue
    if gate is None or scheduler.chunked_req is not None:
        return False
    step = state.costs.decode(decoding) if decoding else IDLE_STEP
    tokens = state.queued.count(scheduler.tree_cache, queue, gate.tokens)
    room = scheduler.max_running_requests - len(running.reqs)
    if not gate.holds([req.rid for req in queue], tokens, room, step):
        state.queued.forget()
        return False
    # After a batch the scheduler does not sleep, because it still has to send the results.
    if not decoding and not scheduler.last_batch:
        time.sleep(IDLE_SLEEP)
    return True


def look_after_queue(scheduler: Any) -> None:
    """Do what SGLang does before each prefill batch, in a step in which none is built.

    Without this, requests whose grammar has been compiled would not join the queue.
    """
    grammars = scheduler.grammar_manager
    if grammars.has_waiting_grammars():
        for req in grammars.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
    RELEASE.check_host_cache(scheduler)


def order_queue(
    _result: None, policy: Any, waiting_queue: list[Any], *_args: Any, **_kwargs: Any
) -> None:
    """Put the shortest job first, if the options ask for it; runs after ``calc_priority``."""
    state: SchedulerState | None = getattr(policy.tree_cache, "flashmoa", None)
    if state is None or state.options.schedule != "sjf":
        return
    jobs = [
        _job(policy, state, req, matched=position < _MATCHED_JOBS)
        for position, req in enumerate(waiting_queue)
    ]
    waiting_queue[:] = [waiting_queue[position] for position in shortest_first(jobs, state.costs)]


def keep_kv(req: Any) -> None:
    """Put the KV of a prefill that is sent to no decode engine into the radix tree after all.

    SGLang treats such a prefill as one of its own warm-ups, whose KV it does not keep.
    """
    req.skip_radix_cache_insert = False


def let_go(scheduler: Any, req: Any) -> None:
    """Release what a request holds that has left the queue unserved."""
    RELEASE.release_prefetch(scheduler, req)
    if scheduler.server_args.disaggregation_mode == "prefill":
        RELEASE.release_metadata_buffer(scheduler, req)


def _describe(req: Any) -> WaitingRequest:
    state = state_of(req)
    if state.mark is None:
        return WaitingRequest()
    return WaitingRequest(
        stream=state.stream,
        increment=state.increment_of is not None,
        late=state.mark.late if state.mark.final else None,
        length=len(req.origin_input_ids),
        held=state.held,
    )


def _drop(scheduler: Any, positions: set[int], reason: str) -> None:
    if not positions:
        return
    from sglang.srt.managers.io_struct import AbortReq

    queue = scheduler.waiting_queue
    for position in positions:
        req = queue[position]
        abort = AbortReq(rid=req.rid, abort_message=reason)
        RELEASE.tokenizer_channel(scheduler).send_output(abort, req)
        let_go(scheduler, req)
    scheduler.waiting_queue = _without(queue, positions)


def _without(queue: Sequence[Any], positions: set[int]) -> list[Any]:
    return [req for position, req in enumerate(queue) if position not in positions]


def _job(policy: Any, state: SchedulerState, req: Any, *, matched: bool) -> Job:
    req_state = state_of(req)
    if req_state.queued_at is None:
        req_state.queued_at = state.work
    if matched:
        req_state.uncached = RELEASE.uncached_tokens(policy.tree_cache, req)
    expected = req_state.mark.expected_output if req_state.mark is not None else None
    output = req.sampling_params.max_new_tokens if expected is None else expected
    return Job(
        uncached=total_tokens(req) if req_state.uncached is None else req_state.uncached,
        output=max(0, (output or 0) - len(req.output_ids)),
        queued_at=req_state.queued_at,
        priority=policy.priority_sign * req.priority if policy.enable_priority_scheduling else 0,
    )
