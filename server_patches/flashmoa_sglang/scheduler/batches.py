"""What a scheduler's step prefills; wraps SGLang's own batching.

Tensor-parallel ranks run this independently and must decide alike. So no decision depends on a
clock, but only on the queue, the batch, the streams, the radix tree and the measured costs. The
rules of a batch:

1. *What it prefills* is the first that applies of :func:`_plan`'s cases.
2. *How many tokens ride* along with a decode step, in one forward (SGLang's mixed chunk). A decode
   step reads all weights for a few tokens, and has time left for more: what rides costs the engine
   less than in a forward of its own, for which decodes would have to wait. With the decodes, the
   tokens fill a step up to one of ``STEP_SIZES``, because kernels compute blocks, and no step
   becomes longer than :data:`_LONGEST_STEP` steps without them. Prompts ride in the chunk with
   which they and the decodes wait for the shortest time in all (:func:`choose_prompt_ride`);
   streams as many in each step as costs the engine the least time (:func:`choose_stream_ride`).
   Beside requests of others than linked workflows, fewer than half of the steps are longer than
   ``--flashmoa-itl-budget`` times a step without, which bounds their median time between tokens,
   and these at most :data:`_LONGEST_OF_FEW` times as long. Where riding costs the engine more,
   streams have forwards of their own instead (:func:`_own_forward`).
3. *Which streams* get them: those whose requests are due, those that a step can complete, then one
   after the other in the order in which they were opened, in whole pages (``amounts.py``). A few
   tokens wait for more, unless their stream has ended: its request computes them at hardly any
   cost.
4. *Room*: streams get the KV slots that requests leave, and give way when these need more
   (``admission.py``).
5. *Sharing*: what several requests of the batch have in common is computed once, where the release
   and the attention backend allow it in one forward, otherwise in one after the other
   (``shared_prefill.py``).
6. *Publish and pin*: under the overlap schedule the KV of a forward is put into the radix tree when
   the next step begins: once the forward has been launched, as chunked prefill does it, and before
   its results have come. Only what requests share within a forward is there before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.costs import STEP_SIZES
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.admission import (
    has_room_to_ride,
    held_back,
    make_room,
    place_of_next,
    room_for_streams,
)
from flashmoa_sglang.scheduler.amounts import (
    CHUNKS,
    Ride,
    choose_prompt_ride,
    choose_stream_ride,
    efficient_tokens,
    fewest_tokens,
    fill_tokens,
    least_tokens,
    possible_rides,
    stream_chunk,
)
from flashmoa_sglang.scheduler.pins import can_pin, pin_published
from flashmoa_sglang.scheduler.request import (
    expected_output_left,
    is_increment,
    is_shareable,
    state_of,
    total_tokens,
    uncached_tokens,
)
from flashmoa_sglang.scheduler.state import SPARE_ROWS

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs
    from flashmoa_sglang.scheduler.state import SchedulerState

# Seconds of a forward that a request may have to wait for although it is expected. It comes some 10
# to 20 ms after the text of the agent before has ended.
_SHORT_FORWARD = 0.05
# How many times as long each step may be with the tokens that ride along as it is without them.
_LONGEST_STEP = 2.0
# Beside requests of others than linked workflows, most steps are within the budget. This share of
# the steps, with a margin to a half, may be so many times as long: enough for 512 tokens with a
# model of 8B on an H200.
_LONG_STEPS, _LONGEST_OF_FEW = 0.4, 3.2
# Where riding would cost more, decodes have so many times as long as streams' own forwards. In a
# chain of agents on two engines, each is idle while the other one writes.
_DECODES_PER_FORWARD = 16
# Forwards of more tokens than this are not told apart.
_LARGE_FORWARD = 8192
# Estimated seconds of a step in which nothing runs, and seconds that the scheduler sleeps in it.
_IDLE_STEP, _IDLE_SLEEP = 0.0025, 0.002


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
        before: if not ``None``, streams that grow and are smaller jobs come first, and others fill
            what these leave.
        spends: how much of what decodes have earned it takes, in seconds.
    """

    streams: int = 0
    least: int = 1
    only_streams: bool = False
    rides: int = 0
    before: float | None = None
    spends: float = 0.0


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plan and build a step's batch; wraps ``Scheduler._get_new_batch_prefill_raw``."""
    running = RELEASE.running_batch(scheduler, kwargs)
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    if state is not None:
        _publish_launched(scheduler, state)
    if state is None or not _may_prefill(scheduler):
        return original(scheduler, *args, **kwargs)
    # SGLang takes a batch for full until one of its requests ends. Increments in the last forward
    # may have held the room that was missing.
    if state.increments_ended or not running.reqs:
        running.batch_is_full = state.increments_ended = False
    make_room(scheduler, running)
    try:
        with held_back(scheduler, running):
            state.streams.keep_cached()
            step = _plan(scheduler, running)
            if step is None:
                _keep_grammars_going(scheduler)
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
    # A request whose grammar has been compiled joins the queue when SGLang builds a batch.
    return bool(
        scheduler.waiting_queue
        or scheduler.chunked_req is not None
        or scheduler.grammar_manager.has_waiting_grammars()
        or scheduler.flashmoa.streams.can_prefill_more()
    )


def _plan(scheduler: Any, running: Any) -> Step | None:
    """Decide what this step prefills; ``None``: nothing.

    The cases, in this order:

    1. Prefills wait until there are enough for a forward that hides the transfers of experts.
    2. Requests of clients can start while streams are open, and all of these and the decodes wait
       less if the prompts ride along with decode steps, in chunks.
    3. A request of a client can start: SGLang builds its batch as usual, and streams fill it up if
       it is so small that they hardly lengthen it.
    4. No request decodes: streams have a forward of their own. On a slow engine they leave it idle
       for a moment after a stream has ended, for its request.
    5. Tokens of streams ride along with the decode step, if SGLang can mix the two. What is known
       of a prompt before the agent before writes only fills such a step: its request comes later
       than others, which it would delay.
    6. If it cannot, or riding would cost the engine more, streams have a forward of their own now
       and then (:func:`_own_forward`).
    """
    state: SchedulerState = scheduler.flashmoa
    costs, page = _costs_here(state, running), scheduler.page_size
    decoding = 0 if running.is_empty() or running.is_prefill_only else len(running.reqs)
    if _waits_for_saturation(scheduler, running, decoding):
        return None
    if decoding and not state.no_rides and state.options.itl_budget > 1:
        step = _riding_prompts(scheduler, running, costs)
        if step is not None:
            return step
    if _can_join(scheduler, running):
        if not state.streams.can_prefill_more():
            return Step()
        prefilling = _tokens_of(scheduler, _joining(scheduler, running))
        return Step(fill_tokens(costs, prefilling, page))
    if not state.streams.can_prefill_more():
        return Step()
    least = least_tokens(costs, page)
    others = decoding or _decoding_elsewhere(scheduler)
    if not others:
        # Requests that are due wait for no tokens of others.
        urgent = sum(state.streams.waiting_tokens(next_only=True))
        is_slow = costs.prefill(CHUNKS[0]) > _SHORT_FORWARD
        if is_slow and not urgent and state.streams.await_request():
            return None
        chunk = stream_chunk(costs, urgent or sum(state.streams.waiting_tokens()), page)
        return Step(chunk, least, only_streams=True)
    without = state.costs.decode(others, _kv(running))
    state.earned += without
    if state.options.itl_budget > 1:
        plan = _riding_streams if decoding and not state.no_rides else _own_forward
        step = plan(scheduler, running, costs, without)
        if step is not None:
            return step
    return Step() if scheduler.waiting_queue else None


def _decoding_elsewhere(scheduler: Any) -> int:
    """Return how many requests decode elsewhere, which a forward of this batch would delay.

    With pipeline stages (--pp-size), the largest of the batches that run in turns counts. Ranks
    that step together know the numbers of the last step, of which the largest counts; with some
    --moe-a2a-backend, only that there was a step, and their own number. In one in which any rank
    prefills, these are not of decodes, and the ones before count. A rank that has just prefilled
    streams leaves out a step, in which it learns whether another one decodes by now.
    """
    state, last = scheduler.flashmoa, scheduler.last_batch
    if RELEASE.pipeline_stages(scheduler) > 1:
        state.elsewhere = max(len(batch.reqs) for batch in scheduler.running_mbs)
    elif not scheduler.require_mlp_sync or last is None:
        state.elsewhere = 0
    elif last.is_extend_in_batch:
        state.elsewhere = max(1, state.elsewhere)
    else:
        state.elsewhere = max([1, *(last.global_num_tokens or ())])
    return state.elsewhere


def _waits_for_saturation(scheduler: Any, running: Any, decoding: int) -> bool:
    """Decide whether the whole queue waits in this step, so that a later forward hides transfers.

    If it waits and no request decodes, sleep for most of the step.
    """
    state: SchedulerState = scheduler.flashmoa
    gate, queue = state.saturation_gate, scheduler.waiting_queue
    if gate is None or scheduler.chunked_req is not None:
        return False
    step = state.costs.decode(decoding) if decoding else _IDLE_STEP
    tokens = state.queued.count(scheduler.tree_cache, queue, gate.tokens)
    room = scheduler.max_running_requests - len(running.reqs)
    if not gate.holds([req.rid for req in queue], tokens, room, step):
        state.queued.forget()
        return False
    # After a batch the scheduler does not sleep, because it still has to send the results.
    if not decoding and not scheduler.last_batch:
        time.sleep(_IDLE_SLEEP)
    return True


def _riding_prompts(scheduler: Any, running: Any, costs: Costs) -> Step | None:
    """Let the prompts of requests ride, if that is better for these and the decodes together.

    Without streams, all is as in stock SGLang. Requests that measure such steps always ride.
    """
    state: SchedulerState = scheduler.flashmoa
    joining = _joining(scheduler, running)
    if not joining or not _can_be_mixed(scheduler, joining):
        return None
    marks = [mark for req in joining if (mark := state_of(req).mark) is not None]
    if any(mark.rides for mark in marks):
        return Step(rides=STEP_SIZES[-1])
    is_linked = len(state.streams) > 0 or any(mark.final for mark in marks)
    if not is_linked or not has_room_to_ride(scheduler, running, joining):
        return None
    tokens = _tokens_of(scheduler, joining)
    rides = _allowed_rides(scheduler, running, costs, _LONGEST_STEP)
    ride = choose_prompt_ride(rides, costs, len(running.reqs), len(joining), tokens)
    # SGLang completes a prompt that it has cut into chunks before it starts another, which would
    # have to wait for all the decode steps in between, although it is shorter or more important.
    is_ordered = state.options.schedule == "sjf" or scheduler.enable_priority_scheduling
    if not ride or (tokens > ride and is_ordered):
        return None
    # What the prompts leave of the ride is for streams.
    return Step(max(0, ride - tokens), least_tokens(costs, scheduler.page_size), rides=ride)


def _can_join(scheduler: Any, running: Any) -> bool:
    """Return whether a request of a client could join a batch that is built now."""
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return True
    if not scheduler.waiting_queue:
        return False
    if scheduler.enable_priority_preemption:
        return True
    return not running.batch_is_full and scheduler.get_num_allocatable_reqs(len(running.reqs)) > 0


def _joining(scheduler: Any, running: Any) -> list[Any]:
    """Return the request whose prompt is cut into chunks, if any, and those with a place."""
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    if running.batch_is_full:
        return chunked
    places = scheduler.get_num_allocatable_reqs(len(running.reqs)) - len(chunked)
    return chunked + scheduler.waiting_queue[: max(places, 0)]


def _tokens_of(scheduler: Any, joining: Sequence[Any]) -> int:
    """Return about how many tokens requests compute in the next forwards.

    If they are more than :data:`_LARGE_FORWARD`, not all of them are counted.
    """
    tokens = 0
    for req in joining:
        if req is scheduler.chunked_req:
            tokens += total_tokens(req) - RELEASE.computed_until(req)
        else:
            tokens += uncached_tokens(scheduler.tree_cache, req)
        if tokens >= _LARGE_FORWARD:
            break
    return tokens


def _can_be_mixed(scheduler: Any, joining: Sequence[Any]) -> bool:
    """Return whether SGLang can cut the prompts of all these requests and mix them with decodes.

    It mixes no prompt whose log-probabilities are asked for, nor embeddings. With deterministic
    kernels it cuts prompts only at multiples that may be longer than a ride.
    """
    return scheduler.truncation_align_size is None and not any(
        req.return_logprob or req.input_embeds is not None or req.multimodal_inputs is not None
        for req in joining
    )


def _costs_here(state: SchedulerState, running: Any) -> Costs:
    """Return the costs of this step's forward, behind the contexts of its decodes and streams."""
    return state.costs.behind(_kv(running), state.streams.context())


def _kv(running: Any) -> int:
    """Return how many tokens have KV of the requests that decode."""
    return sum(map(total_tokens, running.reqs))


def _limit(state: SchedulerState, running: Any) -> float:
    """Return the most seconds between tokens that the operator allows those that decode."""
    if not (limits := state.options.itl_limits()):
        return inf
    others = limits.get(None, inf)
    return min((limits.get(req.priority, others) for req in running.reqs), default=others)


def _allowed_rides(scheduler: Any, running: Any, costs: Costs, longest: float) -> tuple[Ride, ...]:
    """Return the rides that make the step at most ``longest`` times as long, within the limit."""
    page, most, decoding = scheduler.page_size, scheduler.chunked_prefill_size, len(running.reqs)
    rides = possible_rides(costs, decoding, longest, page, most)
    if (limit := _limit(scheduler.flashmoa, running)) < inf:
        left = limit - scheduler.flashmoa.costs.decode(decoding, _kv(running))
        rides = tuple(ride for ride in rides if ride[1] <= left)
    return rides


def _riding_streams(scheduler: Any, running: Any, costs: Costs, step: float) -> Step | None:
    """Plan a decode step along with which tokens of streams ride, or a forward of their own.

    Args: step: seconds of a step in which requests only decode.
    """
    state: SchedulerState = scheduler.flashmoa
    decoding, least = len(running.reqs), least_tokens(costs, scheduler.page_size)
    price = step / _LONG_STEPS
    longest, short, share = _LONGEST_STEP, inf, 1.0
    if any(map(state.streams.is_stranger, running.reqs)):
        longest, share = _LONGEST_OF_FEW, _LONG_STEPS
        short = (state.options.itl_budget - 1) * step
    rides = _allowed_rides(scheduler, running, costs, longest)
    if state.earned < price:
        rides = tuple(ride for ride in rides if ride[1] <= short)
    before = place_of_next(scheduler)
    waiting = state.streams.waiting_tokens(before=before)
    ends = [expected_output_left(req) for req in running.reqs]
    fewest = fewest_tokens(len(state.streams), least) - decoding
    rate = costs.per_token_at_best
    ride, added = choose_stream_ride(rides, rate, waiting, ends, fewest, (short, share))
    if not ride:
        return _own_forward(scheduler, running, costs, step)
    if not state.streams.has_increment(ride, least):
        return None
    # What was earned before pays for one long step, and for no other one soon after it.
    state.earned = min(state.earned, price + step)
    spends = price if added > short else 0.0
    return Step(ride, least, only_streams=True, rides=ride, before=before, spends=spends)


def _own_forward(scheduler: Any, running: Any, costs: Costs, step: float) -> Step | None:
    """Plan a forward for streams alone, for which decodes wait, once these have had as much time.

    The forward is the smallest one whose tokens take hardly longer than those of a large one, or
    a chunk: streams cost the engine little more than without links, and decodes wait for a short
    time. Ranks that step together leave it to one another, however few of them have streams. If
    SGLang can mix the two, fewer tokens, and what is known before the agent before writes,
    wait, and decodes have :data:`_DECODES_PER_FORWARD` times as long: an engine that is idle before
    long computes these tokens at no cost.

    Args: step: seconds of a step in which requests only decode, here or elsewhere.
    """
    state: SchedulerState = scheduler.flashmoa
    streams, page = state.streams, scheduler.page_size
    least, before = least_tokens(costs, page), place_of_next(scheduler)
    waiting = sum(streams.waiting_tokens(before=before))
    efficient = min(efficient_tokens(costs), scheduler.chunked_prefill_size or CHUNKS[-1])
    # A rank does not know of the others' streams, which delay its decodes, too.
    times = RELEASE.data_parallel_ranks(scheduler.server_args) if scheduler.require_mlp_sync else 1
    if running.reqs and not state.no_rides:
        if waiting < efficient:
            state.earned = min(state.earned, step / _LONG_STEPS)
            return None
        times = _DECODES_PER_FORWARD
    # Some tokens of those that grow wait for more at nearly every moment.
    elif waiting < least:
        before, waiting = None, sum(streams.waiting_tokens())
    size = min(waiting, efficient)
    if (limit := _limit(state, running) - step) < inf:
        size = min(size, costs.tokens_within(limit))
    size = max(page, size - size % page)
    seconds = costs.prefill(size)
    if seconds > limit or state.earned < max(times * seconds, step / _LONG_STEPS):
        return None
    return Step(size, least, only_streams=True, before=before, spends=state.earned)


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
    if step.only_streams:
        # The operator may let SGLang mix all prefill with decodes (--enable-mixed-chunk).
        state.only_streams, running.batch_is_full, scheduler.is_mixed_chunk = True, False, False
    if step.rides:
        # SGLang mixes nothing with decodes that return log-probabilities, but ``results.mix`` can.
        scheduler.is_mixed_chunk, running.return_logprob = True, False
        scheduler.chunked_prefill_size = step.rides + len(running.reqs)
    state.needs_pages = scheduler.is_mixed_chunk
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
    state: SchedulerState = scheduler.flashmoa
    most = min(SPARE_ROWS, scheduler.req_to_token_pool.available_size())
    limits = [step.streams + most * state.streams.beyond, scheduler.max_prefill_tokens]
    if scheduler.chunked_prefill_size is not None and not step.rides:
        limits.append(scheduler.chunked_prefill_size)
    room = room_for_streams(scheduler, running)
    return state.streams.make(min(limits), step.least, room, most, before=step.before)


def _settle(scheduler: Any, batch: Any, step: Step) -> None:
    """Share and count the KV that the built batch computes."""
    state: SchedulerState = scheduler.flashmoa
    state.work += batch.extend_num_tokens
    state.earned -= step.spends
    if step.rides:
        state.rode_along += sum(
            RELEASE.computed_until(req) - RELEASE.cached_tokens(req)
            for req in batch.reqs
            if is_increment(req)
        )
    if state.shared is not None:
        state.shared.settle(scheduler, batch)
        state.duplicates_avoided += state.shared.avoided
    if scheduler.enable_overlap and not state.late_kv and can_pin(scheduler):
        shares = state.shared is not None
        state.launched = [req for req in batch.reqs if is_increment(req) or shares]


def _publish_launched(scheduler: Any, state: SchedulerState) -> None:
    """Put the KV of the forward that was launched last into the radix tree, and pin the streams'.

    Its results come after this step: SGLang would put the KV there one step too late for requests
    that share it. Everything that reads or copies it from now on is enqueued after the forward.
    """
    launched, state.launched = state.launched, []
    for req in launched:
        if not _publishes(scheduler, req):
            continue
        RELEASE.publish(scheduler, req)
        stream = state_of(req).increment_of
        if stream is not None:
            # SGLang would go through the tree once more with the result.
            req.skip_radix_cache_insert = True
            state.pins.replace(stream, pin_published(scheduler, req))
            state.streams.settle(req)


def _publishes(scheduler: Any, req: Any) -> bool:
    """Return whether a request that was launched holds KV that other requests may use now."""
    if req.finished() or req.to_finish is not None:
        return False  # Its results have come already, or will not.
    if req.is_retracted:
        return False  # It holds no KV any more, as after a pause within a prompt in chunks.
    if req is scheduler.chunked_req or req.output_ids:
        return False
    return is_increment(req) or is_shareable(req)


def _keep_grammars_going(scheduler: Any) -> None:
    """Do what SGLang does before each prefill batch, in a step in which none is built.

    Without this, requests whose grammar has been compiled would not join the queue.
    """
    grammars = scheduler.grammar_manager
    if grammars.has_waiting_grammars():
        for req in grammars.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
    RELEASE.check_host_cache(scheduler)
