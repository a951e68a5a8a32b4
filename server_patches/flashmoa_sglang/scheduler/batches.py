"""Hooks around a scheduler's batches: what a step prefills, and how its results are sent.

Tensor-parallel ranks run this independently and must decide alike. So no decision depends on a
clock, but only on the queue, the batch and the radix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.admission import left_of_chunked, make_room, offer_room
from flashmoa_sglang.scheduler.pins import available_tokens, pin_finished, pin_published
from flashmoa_sglang.scheduler.policy import chunk_tokens, pause_steps, ride_tokens
from flashmoa_sglang.scheduler.queue import look_after_queue, prepare, waits_for_saturation
from flashmoa_sglang.scheduler.request import is_increment, is_shareable, state_of
from flashmoa_sglang.scheduler.state import can_pin

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState

# Memory is soon short if it has no room for this many tokens of each decoding request: some steps.
_SOON = 64
_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class Step:
    """The plan of one step's prefill.

    ``tokens``: the most new tokens in its forward; ``None``: SGLang's own limit. ``for_streams``:
    only prompt streams want to prefill. ``mixed``: decodes run in the same forward, and count
    towards ``tokens``. ``first_only``: only the first waiting request may join. ``then_pause``:
    streams leave the next steps to decodes.
    """

    tokens: int | None = None
    for_streams: bool = False
    mixed: bool = False
    first_only: bool = False
    then_pause: bool = False


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plan and build a step's batch; wraps ``Scheduler._get_new_batch_prefill_raw``."""
    running = RELEASE.running_batch(scheduler, kwargs)
    state: SchedulerState = scheduler.flashmoa
    offer_room(scheduler, running)
    if not _may_prefill(scheduler):
        return original(scheduler, *args, **kwargs)
    if scheduler.enable_priority_preemption:
        make_room(scheduler, running)
    turns = {id(req): turn for turn, req in enumerate(scheduler.waiting_queue)}
    held = prepare(scheduler, running)
    decoding = _decoding(running)
    try:
        step = _plan(scheduler, running, decoding)
        if step is None:
            look_after_queue(scheduler)
            return RELEASE.no_batch(running)
        with _limits(scheduler, step):
            build = partial(original, scheduler, *args, **kwargs)
            return _build(build, scheduler, running, step, decoding)
    finally:
        state.shared = None
        if held:
            # Requests that joined the queue while the batch was built come last.
            queue = held + scheduler.waiting_queue
            scheduler.waiting_queue = sorted(queue, key=lambda req: turns.get(id(req), len(turns)))
        state.report_counts(scheduler)


def _may_prefill(scheduler: Any) -> bool:
    """Return whether there may be something to prefill."""
    # A request whose grammar has been compiled joins the queue when SGLang builds a batch.
    return bool(
        scheduler.waiting_queue
        or scheduler.chunked_req is not None
        or scheduler.grammar_manager.has_waiting_grammars()
    )


def _plan(scheduler: Any, running: Any, decoding: int) -> Step | None:
    """Decide what this step prefills; ``None``: nothing.

    The cases, in this order:

    1. Prefills wait until there are enough for a forward that hides the transfers of experts.
    2. A client waits for a prefill: let SGLang build its batch as usual.
    3. Only streams want to prefill, and no request decodes: run a forward that is short enough for
       a request that arrives during it.
    4. There will soon be no room for the rest of an increment that is cut into chunks, and its KV
       cannot be evicted before it is complete: compute the whole rest now.
    5. The decodes need the memory: prefill nothing.
    6. Tokens of one stream ride along with the decode step, in its forward, or with the next one's.
    7. SGLang cannot mix the two, or too few tokens could ride: now and then run a forward for
       streams alone.

    Args: decoding: number of requests that wait for their next token.
    """
    state: SchedulerState = scheduler.flashmoa
    page, queue = scheduler.page_size, scheduler.waiting_queue
    if waits_for_saturation(scheduler, running, decoding):
        return None
    if not _only_streams_want(scheduler):
        return Step()
    chunk = min(chunk_tokens(state.costs, page), scheduler.chunked_prefill_size or _UNBOUNDED)
    if not decoding:
        return Step(4 * chunk if len(queue) <= 1 else chunk, for_streams=True)
    if rest := _last_chance(scheduler, decoding):
        return Step(rest, for_streams=True, first_only=True, then_pause=True)
    if available_tokens(scheduler.tree_cache) < chunk + decoding * page:
        return None
    ride = ride_tokens(state.costs, decoding, state.options.stream_share, page)
    if ride and _can_mix(scheduler, running):
        if not _knows_positions(scheduler, running):
            return None
        return Step(ride + decoding, for_streams=True, mixed=True, first_only=True)
    if state.pause > 0:
        return None
    return Step(chunk, for_streams=True, then_pause=True)


def _only_streams_want(scheduler: Any) -> bool:
    chunked, queue = scheduler.chunked_req, scheduler.waiting_queue
    if chunked is None and not queue:
        return False
    return (chunked is None or is_increment(chunked)) and all(map(is_increment, queue))


def _decoding(batch: Any) -> int:
    """Return how many requests of the running batch wait for their next token."""
    return 0 if batch.is_empty() or batch.is_prefill_only else len(batch.reqs)


def _can_mix(scheduler: Any, running: Any) -> bool:
    """Return whether prefill can ride in one forward with these decodes (SGLang's mixed chunk)."""
    return (
        scheduler.chunked_prefill_size is not None
        and scheduler.spec_algorithm.is_none()
        and not running.return_logprob
        and not scheduler.require_mlp_sync
        and RELEASE.pipeline_stages(scheduler) == 1
    )


def _knows_positions(scheduler: Any, running: Any) -> bool:
    """Return whether SGLang gives these decodes the right positions in a mixed batch.

    It counts their output, and under the overlap schedule takes for granted that each one's last
    token is not part of it yet. That is wrong for a request that was not in the batch before.
    """
    before = scheduler.last_batch
    ran = {id(req) for req in before.reqs} if before is not None else set[int]()
    return not scheduler.enable_overlap or all(id(req) in ran for req in running.reqs)


def _last_chance(scheduler: Any, decoding: int) -> int:
    """Return how many tokens of a chunked increment are left, if there is soon no room for them."""
    tree, page = scheduler.tree_cache, scheduler.page_size
    left, step = left_of_chunked(scheduler), decoding * page
    if not left or available_tokens(tree) >= left + max(2 * step, decoding * _SOON):
        return 0
    scheduler.flashmoa.pins.make_room(left + step)
    return left if available_tokens(tree) >= left + step else 0


@contextmanager
def _limits(scheduler: Any, step: Step) -> Generator[None]:
    """Set SGLang's limits so that the batch that is built in this context follows the plan."""
    chunked_prefill_size, is_mixed = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
    queue = scheduler.waiting_queue
    if step.tokens is not None and chunked_prefill_size is not None:
        scheduler.chunked_prefill_size = min(step.tokens, chunked_prefill_size)
    if step.mixed:
        scheduler.is_mixed_chunk = True
    # Offering many requests in every decode step would cost more than the step. A request that is
    # being chunked comes before the first in the queue.
    joining = len(queue)
    if step.first_only:
        joining = 0 if scheduler.chunked_req is not None else 1
        scheduler.waiting_queue = queue[:joining]
    try:
        yield
    finally:
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = chunked_prefill_size, is_mixed
        if step.first_only:
            scheduler.waiting_queue = scheduler.waiting_queue + queue[joining:]


def _build(
    original: Callable[[], Any], scheduler: Any, running: Any, step: Step, decoding: int
) -> Any:
    state: SchedulerState = scheduler.flashmoa
    full = running.batch_is_full
    state.start_sharing(scheduler)
    state.lack_concerns_streams = step.for_streams
    result = original()
    batch, running = RELEASE.split_batches(scheduler, result)
    if state.lack_concerns_streams:
        running.batch_is_full = full  # There may still be room for requests.
    computed = _settle(scheduler, batch) if batch is not None else 0
    if step.mixed:
        state.rode_along += max(0, computed - decoding)
    if step.for_streams and not decoding:
        state.pause = 0
    elif step.then_pause and computed:
        # The pause follows from the tokens that were computed, which may be fewer than allowed.
        share = state.options.stream_share
        state.pause = pause_steps(state.costs, computed, decoding, share)
    return result


def _settle(scheduler: Any, batch: Any) -> int:
    """Share, publish, pin and count the KV that the built batch computes. Return its tokens."""
    state: SchedulerState = scheduler.flashmoa
    state.work += batch.extend_num_tokens
    state.timer.start(batch.reqs, batch.extend_num_tokens)
    if state.shared is not None:
        state.shared.settle(scheduler, batch, lambda req: _publishes(scheduler, req))
        state.duplicates_avoided += state.shared.avoided
    # Models that keep a state besides KV do not have that state before the forward.
    for req in batch.reqs if can_pin(scheduler) else ():
        stream = state_of(req).increment_of
        if stream is not None and _publishes(scheduler, req):
            if state.shared is None:
                RELEASE.publish(scheduler, req)
            state.pins.replace(stream, pin_published(scheduler, req))
    return batch.extend_num_tokens


def _publishes(scheduler: Any, req: Any) -> bool:
    """Return whether other requests should find the request's KV already in the next step.

    Under the overlap schedule SGLang would put it into the tree one step too late.
    """
    if not scheduler.flashmoa.publishes_early:
        return False
    if req is scheduler.chunked_req or req.finished() or req.to_finish is not None:
        return False
    return is_increment(req) or (
        scheduler.enable_overlap and is_shareable(req) and not req.output_ids
    )


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Forget all pins once the tree is flushed; wraps ``Scheduler.flush_cache``."""
    flushed = original(scheduler, *args, **kwargs)
    if flushed:
        scheduler.flashmoa.pins.forget()
    return flushed


def stream_output(
    original: Callable[..., None],
    streamer: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
) -> None:
    """Send answers without text past the detokenizer; wraps ``RELEASE.STREAM_OUTPUT``.

    The HTTP process takes token ids, too, because a server without a tokenizer sends these.
    """
    state: SchedulerState | None = getattr(streamer.tree_cache, "flashmoa", None)
    if state is None or not (direct := [req for req in reqs if _has_no_text(state, req)]):
        original(streamer, reqs, return_logprob, skip_req)
        return
    state.timer.stop(direct)
    for req in direct:
        stream = state_of(req).increment_of
        if state.pins_results and stream is not None:
            state.pins.replace(stream, pin_finished(streamer.tree_cache, req))
    rest = [req for req in reqs if req not in direct]
    if rest:
        original(streamer, rest, return_logprob, skip_req)
    send_to_detokenizer = streamer.send_to_detokenizer
    streamer.send_to_detokenizer = state.tokenizer_channel
    try:
        original(streamer, direct, False, skip_req)
    finally:
        streamer.send_to_detokenizer = send_to_detokenizer


def _has_no_text(state: SchedulerState, req: Any) -> bool:
    mark = state_of(req).mark
    if mark is None or mark.final or req.return_logprob:
        return False
    # SGLang's ``is_prefill_only`` is false with speculative decoding. A prefill engine of a PD pair
    # samples one token even if none is requested.
    return not req.sampling_params.max_new_tokens or state.role == "prefill"
