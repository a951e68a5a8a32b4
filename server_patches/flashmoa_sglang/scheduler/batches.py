"""Hooks around a scheduler's batches: what a step prefills, and how its results are sent.

Tensor-parallel ranks run this independently and must decide alike. So no decision depends on a
clock, but only on the queue, the batch, the streams and the radix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.costs import STEP_SIZES
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.admission import has_room_to_ride, make_room, room_for_streams
from flashmoa_sglang.scheduler.pins import can_pin, pin_published
from flashmoa_sglang.scheduler.policy import (
    fewest_tokens,
    fill_tokens,
    least_tokens,
    stream_chunk,
)
from flashmoa_sglang.scheduler.queue import look_after_queue, waits_for_saturation
from flashmoa_sglang.scheduler.request import (
    expected_output_left,
    is_increment,
    is_shareable,
    state_of,
)
from flashmoa_sglang.scheduler.rides import possible_rides, prompt_tokens, stream_tokens
from flashmoa_sglang.scheduler.starting import (
    can_be_mixed,
    can_start,
    starting_requests,
    tokens_to_start,
)
from flashmoa_sglang.scheduler.state import SPARE_ROWS

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.rides import Ride
    from flashmoa_sglang.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Step:
    """The plan of one step's prefill.

    Attributes:
        streams: the most tokens of prompt streams in its forward.
        least: the fewest new tokens of all streams that are worth it.
        only_streams: whether waiting requests of clients stay in the queue, because they cannot
            start in this step.
        rides: the most tokens that ride along with the decodes, of streams and of prompts; 0 if the
            decodes wait for this forward.
    """

    streams: int = 0
    least: int = 1
    only_streams: bool = False
    rides: int = 0


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plan and build a step's batch; wraps ``Scheduler._get_new_batch_prefill_raw``."""
    running = RELEASE.running_batch(scheduler, kwargs)
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    if state is None or not _may_prefill(scheduler):
        return original(scheduler, *args, **kwargs)
    # SGLang takes a batch for full until one of its requests ends. Increments in the last forward
    # may have held the room that was missing.
    if state.increments_ended or not running.reqs:
        running.batch_is_full = state.increments_ended = False
    make_room(scheduler, running)
    try:
        state.streams.keep_cached(lambda: room_for_streams(scheduler, running))
        step = _plan(scheduler, running)
        if step is None:
            look_after_queue(scheduler)
            return RELEASE.no_batch(running)
        with _prepared(scheduler, running, step):
            state.start_sharing(scheduler)
            result = original(scheduler, *args, **kwargs)
            batch, running = RELEASE.split_batches(scheduler, result)
            if batch is not None:
                _settle(scheduler, batch, step)
        return result
    finally:
        state.shared = None
        state.report_counts(scheduler)


def _may_prefill(scheduler: Any) -> bool:
    """Return whether there may be something to prefill."""
    # A request whose grammar has been compiled joins the queue when SGLang builds a batch.
    return bool(
        scheduler.waiting_queue
        or scheduler.chunked_req is not None
        or scheduler.grammar_manager.has_waiting_grammars()
        or scheduler.flashmoa.streams.want()
    )


def _plan(scheduler: Any, running: Any) -> Step | None:
    """Decide what this step prefills; ``None``: nothing.

    The cases, in this order:

    1. Prefills wait until there are enough for a forward that hides the transfers of experts.
    2. Requests of clients can start while streams are open, and all of these and the decodes wait
       less if the prompts ride along with decode steps, in chunks.
    3. A request of a client can start: SGLang builds its batch as usual, and streams fill it up if
       it is so small that they hardly lengthen it.
    4. No request decodes: streams have a forward of their own.
    5. Tokens of streams ride along with the decode step, if SGLang can mix the two. Streams never
       stop decodes for a forward of their own. What is known of a prompt before the agent before
       writes does not ride: its request comes later than others, which it would delay.
    """
    state: SchedulerState = scheduler.flashmoa
    costs, page, decoding = state.costs, scheduler.page_size, _decoding(running)
    if waits_for_saturation(scheduler, running, decoding):
        return None
    rides: tuple[Ride, ...] = ()
    if decoding and not state.no_rides:
        budget, most = state.options.itl_budget, scheduler.chunked_prefill_size
        rides = possible_rides(costs, decoding, budget, page, most)
        step = _riding_prompts(scheduler, running, rides, decoding)
        if step is not None:
            return step
    if can_start(scheduler, running):
        if not state.streams.want():
            return Step()
        prefilling = tokens_to_start(scheduler, starting_requests(scheduler, running))
        return Step(fill_tokens(costs, prefilling, page))
    if not state.streams.want():
        return Step()
    least = least_tokens(costs, page)
    if not decoding:
        chunk = stream_chunk(costs, sum(state.streams.waiting_tokens()), page)
        return Step(chunk, least, only_streams=True)
    if rides:
        ends = [expected_output_left(req) for req in running.reqs]
        fewest = fewest_tokens(len(state.streams), least) - decoding
        waiting = state.streams.waiting_tokens(growing=True)
        ride = stream_tokens(rides, costs.per_token_at_best, waiting, ends, fewest)
        if ride:
            return Step(ride, least, only_streams=True, rides=ride)
    return Step() if scheduler.waiting_queue else None


def _riding_prompts(
    scheduler: Any, running: Any, rides: tuple[Ride, ...], decoding: int
) -> Step | None:
    """Let the prompts of requests ride, if that is better for these and the decodes together.

    Without streams, all is as in stock SGLang. Requests that measure such steps always ride.
    """
    state: SchedulerState = scheduler.flashmoa
    starting = starting_requests(scheduler, running)
    if not starting or not can_be_mixed(scheduler, starting):
        return None
    marks = [mark for req in starting if (mark := state_of(req).mark) is not None]
    if any(mark.rides for mark in marks):
        return Step(rides=STEP_SIZES[-1])
    is_linked = len(state.streams) > 0 or any(mark.final for mark in marks)
    if not is_linked or not has_room_to_ride(scheduler, running, starting):
        return None
    tokens = tokens_to_start(scheduler, starting)
    ride = prompt_tokens(rides, state.costs, decoding, len(starting), tokens)
    # SGLang completes a prompt that it has cut into chunks before it starts another, which would
    # have to wait for all the decode steps in between, although it is shorter or more important.
    is_ordered = state.options.schedule == "sjf" or scheduler.enable_priority_scheduling
    if not ride or (tokens > ride and is_ordered):
        return None
    # What the prompts leave of the ride is for streams.
    return Step(max(0, ride - tokens), least_tokens(state.costs, scheduler.page_size), rides=ride)


def _decoding(batch: Any) -> int:
    """Return how many requests of the running batch wait for their next token."""
    return 0 if batch.is_empty() or batch.is_prefill_only else len(batch.reqs)


@contextmanager
def _prepared(scheduler: Any, running: Any, step: Step) -> Generator[None]:
    """Put a step's increments into the queue, and let SGLang build its batch as planned.

    Afterwards the queue has the requests of clients that have not joined the batch.
    """
    state: SchedulerState = scheduler.flashmoa
    chunk, is_mixed = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
    full = running.batch_is_full
    made = _make_increments(scheduler, running, step) if step.streams else []
    waiting = scheduler.waiting_queue
    scheduler.waiting_queue = made if step.only_streams else [*waiting, *made]
    if step.rides:
        # SGLang mixes nothing with decodes that return log-probabilities, but ``results.mix`` can.
        scheduler.is_mixed_chunk, running.return_logprob = True, False
        scheduler.chunked_prefill_size = step.rides + len(running.reqs)
    state.needs_pages = scheduler.is_mixed_chunk
    if step.only_streams:
        state.only_streams, running.batch_is_full = True, False
    try:
        yield
    finally:
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = chunk, is_mixed
        if step.rides:
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


def _make_increments(scheduler: Any, running: Any, step: Step) -> list[Any]:
    limits = [step.streams, scheduler.max_prefill_tokens]
    if scheduler.chunked_prefill_size is not None and not step.rides:
        limits.append(scheduler.chunked_prefill_size)
    return scheduler.flashmoa.streams.make(
        min(limits),
        step.least,
        room_for_streams(scheduler, running),
        min(SPARE_ROWS, scheduler.req_to_token_pool.available_size()),
        growing=step.rides > 0,
    )


def _settle(scheduler: Any, batch: Any, step: Step) -> None:
    """Share, publish, pin and count the KV that the built batch computes."""
    state: SchedulerState = scheduler.flashmoa
    state.work += batch.extend_num_tokens
    if step.rides:
        state.rode_along += sum(
            RELEASE.computed_until(req) - RELEASE.cached_tokens(req)
            for req in batch.reqs
            if is_increment(req)
        )
    state.timer.start(batch.reqs, batch.extend_num_tokens, len(batch.decoding_reqs or ()))
    if state.shared is not None:
        state.shared.settle(scheduler, batch, lambda req: _publishes(scheduler, req))
        state.duplicates_avoided += state.shared.avoided
    # Models that keep a state besides KV do not have that state before the forward.
    for req in batch.reqs if can_pin(scheduler) else ():
        stream = state_of(req).increment_of
        if stream is not None and _publishes(scheduler, req):
            if state.shared is None:
                RELEASE.publish(scheduler, req)
            # Otherwise SGLang would go through the tree once more with the result.
            req.skip_radix_cache_insert = True
            state.pins.replace(stream, pin_published(scheduler, req))
            state.streams.settle(req)


def _publishes(scheduler: Any, req: Any) -> bool:
    """Return whether other requests should find the request's KV already in the next step.

    Under the overlap schedule SGLang would put it into the tree one step too late.
    """
    if scheduler.flashmoa.late_kv:
        return False
    if req is scheduler.chunked_req or req.finished() or req.to_finish is not None:
        return False
    return is_increment(req) or (
        scheduler.enable_overlap and is_shareable(req) and not req.output_ids
    )
