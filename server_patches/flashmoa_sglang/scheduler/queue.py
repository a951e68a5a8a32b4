"""Holds waiting requests back, orders them before each prefill, and takes requests out."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.messages import STREAM_OPENED
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.policy import IDLE_SLEEP, IDLE_STEP, Job, shortest_first
from flashmoa_sglang.scheduler.request import is_increment, state_of, total_tokens

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState

# Matching a prompt with the radix tree takes time. After this many requests of the queue, the last
# known number of uncached tokens is good enough.
_MATCHED_JOBS = 128


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


def prefetch(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Look for no KV of increments in storage; wraps ``Scheduler._prefetch_kvcache``.

    A request waits in the queue while SGLang looks for its KV, but an increment leaves the queue
    after one step, and would never join a batch.
    """
    return None if is_increment(req) else original(scheduler, req, *args, **kwargs)


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
    """Put increments last, and the shortest job first; runs after ``calc_priority``.

    The shortest job comes first only if the options ask for it.
    """
    state: SchedulerState | None = getattr(policy.tree_cache, "flashmoa", None)
    if state is None:
        return
    # After an increment that finds no room, SGLang would consider no other request.
    waiting_queue.sort(key=is_increment)
    if state.options.schedule != "sjf":
        return
    requests = [req for req in waiting_queue if not is_increment(req)]
    jobs = [
        _job(policy, state, req, matched=position < _MATCHED_JOBS)
        for position, req in enumerate(requests)
    ]
    order = shortest_first(jobs, state.costs)
    waiting_queue[: len(requests)] = [requests[position] for position in order]


def let_go(scheduler: Any, req: Any) -> None:
    """Release what a request holds that has left the queue unserved."""
    RELEASE.release_prefetch(scheduler, req)
    if scheduler.server_args.disaggregation_mode == "prefill":
        RELEASE.release_metadata_buffer(scheduler, req)


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


def take_request(
    scheduler: Any, message: Any, make: Callable[[Any], Any], *, runs: bool = True
) -> Any:
    """Let SGLang make a request and take it out of its queue; ``None`` if it was refused.

    Args:
        message: SGLang's message of the request.
        make: lets SGLang make a request from such a message and put it into its queue.
        runs: whether the request will be computed.
    """
    # It must not be refused because the queue is full, since it does not wait there.
    queue, scheduler.waiting_queue = scheduler.waiting_queue, []
    make(message)
    if scheduler.server_args.disaggregation_mode == "prefill":
        bootstrap = scheduler.disagg_prefill_bootstrap_queue
        if runs:
            # A request that is sent nowhere is ready for its prefill at once.
            scheduler.waiting_queue.extend(bootstrap.pop_bootstrapped())
            # It stays there while SGLang has no buffer for its metadata, and others would join it.
            for req in [req for req in bootstrap.queue if req.rid == message.rid]:
                bootstrap.queue.remove(req)
                let_go(scheduler, req)
        elif bootstrap.queue and bootstrap.queue[-1].rid == message.rid:
            scheduler.waiting_queue.append(bootstrap.queue.pop())
    made, scheduler.waiting_queue = scheduler.waiting_queue, queue
    queue.extend(req for req in made if req.rid != message.rid)
    return next((req for req in made if req.rid == message.rid), None)


def end_stream_opener(scheduler: Any, req: Any) -> None:
    """End the request that opened a prompt stream, without computing it."""
    from sglang.srt.managers.io_struct import AbortReq

    # With this status SGLang gives back what the request holds, such as its adapter.
    status = HTTPStatus.SERVICE_UNAVAILABLE
    reason: Any = {"type": "abort", "status_code": status, "message": STREAM_OPENED}
    abort = AbortReq(rid=req.rid, finished_reason=reason)
    RELEASE.tokenizer_channel(scheduler).send_output(abort, req)
    let_go(scheduler, req)
