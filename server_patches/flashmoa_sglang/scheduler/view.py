"""Read a scheduler: :func:`read` returns the :class:`StepView` that decides its next step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.costs import STEP_SIZES
from flashmoa_sglang.scheduler.admission import has_room_to_ride, place_of_next
from flashmoa_sglang.scheduler.plan import StepView
from flashmoa_sglang.scheduler.request import state_of, total_tokens, uncached_tokens
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState

# An idle step with waiting prefills takes about as long as its sleep.
IDLE_STEP_SECONDS = 0.0025


def read(scheduler: Any, running: Any) -> StepView:
    """Read the next step; ``running``: SGLang's batch of decoding requests."""
    state: SchedulerState = scheduler.flashmoa
    decodes = 0 if running.is_empty() or running.is_prefill_only else len(running.reqs)
    if _waits_for_saturation(scheduler, running, decodes):
        return StepView(waits=True, decodes=decodes)
    streams = state.streams
    joining = _joining(scheduler, running)
    # With priorities, a waiting request may replace a running one.
    replaces = scheduler.enable_priority_preemption and bool(scheduler.waiting_queue)
    can_join = bool(joining) or replaces
    marks = [mark for req in joining if (mark := state_of(req).mark) is not None]
    can_mix = bool(decodes) and not state.no_rides and _can_mix(scheduler, running, joining)
    measures = can_mix and any(mark.rides for mark in marks)
    has_streams = len(streams) > 0 or any(mark.final for mark in marks)
    if measures or not has_streams:
        return StepView(has_streams=False, decodes=decodes, measures=measures)
    # Counting takes time, and matters only to streams.
    grow = streams.can_prefill_more()
    prompts = (_prompt_tokens(scheduler, joining) if grow else 0) if can_join else None
    # Without a free place, a request replaces another one, which may not be mixable.
    fits = has_room_to_ride(scheduler, running, joining) if joining else not can_join
    together = scheduler.require_mlp_sync
    elsewhere = 0 if decodes else _decoding_elsewhere(scheduler)
    before = place_of_next(scheduler) if grow and (decodes or elsewhere) else None
    leading, ended = streams.leading_tokens(before)
    limit = _limit(state, running)
    return StepView(
        decodes=decodes,
        elsewhere=elsewhere,
        ranks=state.ranks if together else 1,
        prompts=prompts,
        queued=bool(scheduler.waiting_queue),
        mixes=can_mix and fits,
        waiting=leading if before is None else streams.leading_tokens(None)[0],
        leading=leading,
        ended=ended,
        before=before,
        steps=state.steps_without_streams,
        limit=limit,
        kv=sum(map(total_tokens, running.reqs)) if limit < inf else 0,
        context=streams.context() if limit < inf else 0,
        page=scheduler.page_size,
        chunk=scheduler.chunked_prefill_size,
    )


def _decoding_elsewhere(scheduler: Any) -> int:
    """Return the number of requests on other ranks or stages that a forward here would delay.

    With pipeline stages (--pp-size), batches run in turns, and the largest batch counts. Ranks that
    step together know all ranks' numbers of the last step, and the largest number counts. With some
    --moe-a2a-backend, a rank knows only that there was a step, and its own number. If a rank
    prefilled in the last step, the numbers are no decodes, and the earlier number counts. A rank
    that has just prefilled streams skips a step. So it learns whether another rank decodes by now.
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
    """Return whether the queue waits in this step, so that a later forward hides transfers."""
    state: SchedulerState = scheduler.flashmoa
    gate, queue = state.saturation_gate, scheduler.waiting_queue
    if gate is None or scheduler.chunked_req is not None or any(map(_measures, queue)):
        return False
    step = state.costs.decode(decoding) if decoding else IDLE_STEP_SECONDS
    tokens = state.queued.count(scheduler.tree_cache, queue, gate.tokens)
    room = scheduler.max_running_requests - len(running.reqs)
    if not gate.must_wait([req.rid for req in queue], tokens, room, step):
        state.queued.forget()
        return False
    return True


def _measures(req: Any) -> bool:
    mark = state_of(req).mark
    return mark is not None and mark.timed


def _joining(scheduler: Any, running: Any) -> list[Any]:
    """Return the request that is cut into chunks, if any, and the waiting requests with a place."""
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    if running.batch_is_full:
        return chunked
    places = scheduler.get_num_allocatable_reqs(len(running.reqs)) - len(chunked)
    return chunked + scheduler.waiting_queue[: max(places, 0)]


def _prompt_tokens(scheduler: Any, joining: Sequence[Any]) -> int:
    """Return about how many tokens the requests compute, counted up to the largest step."""
    tokens = 0
    for req in joining:
        if req is scheduler.chunked_req:
            tokens += total_tokens(req) - RELEASE.computed_until(req)
        else:
            tokens += uncached_tokens(scheduler.tree_cache, req)
        if tokens >= STEP_SIZES[-1]:
            break
    return tokens


def _can_mix(scheduler: Any, running: Any, joining: Sequence[Any]) -> bool:
    """Return whether SGLang can cut the prompts of all these requests and mix them with decodes.

    It mixes neither prompts with log-probabilities nor embeddings, and nothing with a beam search.
    With deterministic kernels it cuts prompts only at multiples that may be longer than a mixed
    step.
    """
    return (
        scheduler.truncation_align_size is None
        and not any(
            req.return_logprob or req.input_embeds is not None or req.multimodal_inputs is not None
            for req in joining
        )
        # Releases without beam search have no such attribute.
        and not any(getattr(req, "beam_group", None) is not None for req in running.reqs)
    )


def _limit(state: SchedulerState, running: Any) -> float:
    """Return the strictest ``--flashmoa-itl-ms`` of the running requests, in seconds."""
    if not (limits := state.options.itl_limits()):
        return inf
    others = limits.get(None, inf)
    return min((limits.get(req.priority, others) for req in running.reqs), default=others)
