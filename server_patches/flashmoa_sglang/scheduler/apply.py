"""Build a step's batch as planned; wraps SGLang's own batching.

``view.py`` reads a step, ``plan.py`` decides it, and this module applies it. Rules of a batch:

1. *Streams*: streams whose requests are due come first, then growing streams in opening order.
2. *Room*: streams get the KV slots that requests leave. Requests that need room evict streams
   (``admission.py``).
3. *Sharing*: a prefix that several requests share is computed once: one request joins the batch,
   and the others wait for a later one (``shared_prefill.py``).
4. *Publish and pin*: under the overlap schedule the KV of a forward is put into the radix tree when
   the next step begins: once the forward has been launched, as chunked prefill does it, and before
   its results have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.scheduler.admission import deferred, make_room, room_for_streams
from flashmoa_sglang.scheduler.pins import can_pin
from flashmoa_sglang.scheduler.plan import Step, plan
from flashmoa_sglang.scheduler.request import is_increment, is_shareable, state_of
from flashmoa_sglang.scheduler.shared_prefill import SharedPrefill
from flashmoa_sglang.scheduler.state import SPARE_ROWS
from flashmoa_sglang.scheduler.view import IDLE_STEP_SECONDS, read
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.plan import StepView
    from flashmoa_sglang.scheduler.state import SchedulerState


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plan and build a step's batch; wraps ``Scheduler._get_new_batch_prefill_raw``."""
    running = RELEASE.running_batch(scheduler, kwargs)
    state: SchedulerState = scheduler.flashmoa
    _publish_launched(scheduler, state)
    if not _may_prefill(scheduler):
        return original(scheduler, *args, **kwargs)
    # SGLang takes a batch for full until one of its requests ends. Increments in the last forward
    # may have used the missing room.
    if state.increments_ended or not running.reqs:
        running.batch_is_full = state.increments_ended = False
    make_room(scheduler, running)
    try:
        with deferred(scheduler, running):
            state.streams.keep_cached()
            view = read(scheduler, running)
            step = plan(view, state.costs, state.options.itl_budget)
            state.steps_without_streams += bool(view.decodes or view.elsewhere)
            made = _make_increments(scheduler, running, step) if step.streams else []
            if step.only_streams and not made:
                step = Step(builds=view.queued)
            if not step.builds:
                _wait(scheduler, view)
                return RELEASE.no_batch(running)
            with _prepared(scheduler, running, step, made):
                if state.shares(scheduler):
                    state.shared = SharedPrefill(scheduler.page_size)
                result = original(scheduler, *args, **kwargs)
                batch, running = RELEASE.split_batches(scheduler, result)
                if batch is not None:
                    _settle(scheduler, batch, step, view.decodes or view.elsewhere)
            return result
    finally:
        state.shared = None
        state.streams.report()


def _may_prefill(scheduler: Any) -> bool:
    return bool(
        scheduler.waiting_queue
        or scheduler.chunked_req is not None
        or scheduler.grammar_manager.has_waiting_grammars()
        or scheduler.flashmoa.streams.can_prefill_more()
    )


def _wait(scheduler: Any, view: StepView) -> None:
    # After a batch the scheduler does not sleep, because it still has to send the results.
    if view.waits and not view.decodes and not scheduler.last_batch:
        time.sleep(IDLE_STEP_SECONDS)
    _queue_compiled(scheduler)
    RELEASE.check_host_cache(scheduler)


@contextmanager
def _prepared(scheduler: Any, running: Any, step: Step, made: list[Any]) -> Generator[None]:
    """Put a step's increments into the queue, and let SGLang build its batch as planned.

    Afterwards the queue has the requests of clients that have not joined the batch.
    """
    state: SchedulerState = scheduler.flashmoa
    chunk, is_mixed = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
    grammars = scheduler.grammar_manager
    full = running.batch_is_full
    waiting = scheduler.waiting_queue
    scheduler.waiting_queue = made if step.only_streams else [*waiting, *made]
    if step.only_streams:
        # The operator may let SGLang mix all prefill with decodes (--enable-mixed-chunk).
        state.only_streams, running.batch_is_full, scheduler.is_mixed_chunk = True, False, False
    if step.mixed:
        # SGLang mixes nothing with decodes that return log-probabilities, but ``results.mix`` can.
        scheduler.is_mixed_chunk, running.return_logprob = True, False
        scheduler.chunked_prefill_size = step.mixed + len(running.reqs)
    if step.only_streams or step.mixed:
        # A request that joins while SGLang builds the batch was not checked for mixing.
        scheduler.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
    state.needs_pages = scheduler.is_mixed_chunk
    try:
        yield
    finally:
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = chunk, is_mixed
        scheduler.grammar_manager = grammars
        if step.mixed:
            running.return_logprob = any(req.return_logprob for req in running.reqs)
        left = scheduler.waiting_queue
        for req in left:
            if is_increment(req):
                state.streams.discard(req)
        clients = [req for req in left if not is_increment(req)]
        if step.only_streams:
            state.only_streams, running.batch_is_full = False, full
            clients = [*waiting, *clients]
        scheduler.waiting_queue = clients
    if step.only_streams or step.mixed:
        _queue_compiled(scheduler)


def _make_increments(scheduler: Any, running: Any, step: Step) -> list[Any]:
    state: SchedulerState = scheduler.flashmoa
    most = min(SPARE_ROWS, scheduler.req_to_token_pool.available_size())
    limit = scheduler.max_prefill_tokens
    if scheduler.chunked_prefill_size is not None and not step.mixed:
        limit = min(limit, scheduler.chunked_prefill_size)
    tokens = min(step.streams, limit - most * state.streams.beyond)
    room = room_for_streams(scheduler, running)
    return state.streams.make(tokens, room, most, before=step.before)


def _settle(scheduler: Any, batch: Any, step: Step, decodes: int) -> None:
    """Count the tokens of the built batch, and note whose KV the next step publishes."""
    state: SchedulerState = scheduler.flashmoa
    state.work += batch.extend_num_tokens
    if step.only_streams and not step.mixed:
        state.steps_without_streams = 0
    increments = [
        (req, RELEASE.computed_until(req) - RELEASE.cached_tokens(req))
        for req in batch.reqs
        if is_increment(req)
    ]
    tokens = sum(prefilled for _, prefilled in increments)
    if step.mixed:
        state.rode_along += tokens
    if tokens and decodes:
        context = sum(RELEASE.cached_tokens(req) * prefilled for req, prefilled in increments)
        mixed, others = scheduler.is_mixed_chunk, batch.extend_num_tokens - tokens
        delay = _delay(state.costs, decodes, tokens, context / tokens, others, mixed=mixed)
        for req, prefilled in increments:
            state_of(req).delay = None if delay is None else delay * prefilled / tokens
    if state.shared is not None:
        state.duplicates_avoided += state.shared.avoided
    if scheduler.enable_overlap and not state.late_kv and can_pin(scheduler):
        shares = state.shared is not None
        state.launched = [req for req in batch.reqs if is_increment(req) or shares]


def _delay(
    costs: Costs, decodes: int, tokens: int, context: float, others: int, *, mixed: bool
) -> float | None:
    """Return how many seconds the tokens of increments add to a step of requests that decode.

    Args:
        context: mean number of cached tokens before each token.
        others: number of clients' tokens in the same forward, which would have run without them.
    """
    if costs is UNMEASURED:
        return None
    if mixed:
        return costs.added(decodes, tokens, context)
    alone = costs.prefill(others) if others else 0.0
    return costs.prefill(others + tokens) - alone + costs.per_pair * tokens * context


def _publish_launched(scheduler: Any, state: SchedulerState) -> None:
    """Put the KV of the last launched forward into the radix tree, and pin the streams' KV.

    Its results come after this step: SGLang would put the KV there one step too late for requests
    that share it. Everything that reads or copies it from now on is enqueued after the forward.
    """
    launched, state.launched = state.launched, []
    for req in launched:
        if not _publishes(scheduler, req):
            continue
        RELEASE.publish(scheduler, req)
        if is_increment(req):
            # SGLang would go through the tree once more with the result.
            req.skip_radix_cache_insert = True
            state.streams.publish(req)


def _publishes(scheduler: Any, req: Any) -> bool:
    if req.finished() or req.to_finish is not None:
        return False  # Its results have come already, or will not.
    if req.is_retracted:
        return False  # It has no KV any more, as after a pause within a chunked prompt.
    if req is scheduler.chunked_req or req.output_ids:
        return False
    return is_increment(req) or is_shareable(req)


def _queue_compiled(scheduler: Any) -> None:
    """Queue the requests whose grammar has been compiled, as SGLang before each batch."""
    grammars = scheduler.grammar_manager
    if grammars.has_waiting_grammars():
        for req in grammars.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
