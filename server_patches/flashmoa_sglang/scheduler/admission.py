"""Which waiting requests join a batch: their order, and their room in the KV pool.

Requests of clients come first, and increments of streams get the room that they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.scheduler.pins import available_tokens
from flashmoa_sglang.scheduler.request import (
    is_increment,
    output_left,
    state_of,
    total_tokens,
    uncached_tokens,
)
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.state import SchedulerState

# A request whose prompt gave way waits while the engine does the prompt's work this many times.
_PATIENCE = 32


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a request to a batch, with the tokens that it shares; unpin streams if it has no room.

    Wraps ``PrefillAdder.add_one_req``, where SGLang has counted the requests that joined the batch
    before. So any number of requests find the room that pinned streams occupy.
    """
    state: SchedulerState = adder.tree_cache.flashmoa
    if state.needs_pages:
        RELEASE.reserve_pages(adder)
        state.needs_pages = False
    mark = state_of(req).mark
    if mark is not None and mark.own:
        # SGLang takes a prefill that is sent to no decode engine for a warm-up of its own, whose KV
        # it does not keep.
        req.skip_radix_cache_insert = False

    def add() -> Any:
        ask = partial(original, adder, req, *args, **kwargs)
        return ask() if state.shared is None else state.shared.admit(ask, adder, req)

    if is_increment(req):
        return _admit_increment(add, adder, req)
    result = add()
    if kwargs.get("has_chunked_req"):
        # SGLang can cut one prompt at a time, and would cut this one if streams gave way now.
        return result
    while _lacks_room(result) and state.pins.give_way():
        if adder.can_run_list and adder.can_run_list[-1] is req:
            result = adder.budget_state()
            continue
        # SGLang may count how often a request found no room. So streams give way until it will find
        # some, before it is admitted again.
        uncached = total_tokens(req) - RELEASE.cached_tokens(req)
        needs = uncached + output_left(req) + adder.page_size
        while adder.rem_total_tokens <= needs and state.pins.give_way():
            pass
        result = add()
    return result


def _lacks_room(result: Any) -> bool:
    from sglang.srt.managers.schedule_policy import AddReqResult

    return result == AddReqResult.NO_TOKEN


def _admit_increment(add: Callable[[], Any], adder: Any, req: Any) -> Any:
    """Add an increment to the batch, if it fits as a whole.

    If the forward has no room for it, SGLang would cut it into chunks, and compute the rest before
    requests of clients. If the KV pool has no room, SGLang would take the batch for full. Its
    prefix is the stream's own, so SGLang must not count it as a hit of its cache.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    left = adder.rem_chunk_tokens
    if left is not None and total_tokens(req) - RELEASE.cached_tokens(req) > left:
        return AddReqResult.OTHER
    counts = {name: hits for name, hits in vars(adder).items() if name.endswith("hit_tokens")}
    result = add()
    vars(adder).update(counts)
    return AddReqResult.OTHER if _lacks_room(result) else result


def allocatable_requests(
    original: Callable[..., int], scheduler: Any, *args: Any, **kwargs: Any
) -> int:
    """Return how many requests may join a batch; wraps ``Scheduler.get_num_allocatable_reqs``.

    Increments do not count as running requests, since they end with their forward.
    """
    if scheduler.flashmoa.only_streams:
        return scheduler.req_to_token_pool.available_size()
    return original(scheduler, *args, **kwargs)


@contextmanager
def deferred(scheduler: Any, running: Any) -> Generator[None]:
    """Take requests out of the queue that would evict the prompts of others.

    These are requests whose own prompts gave way. If agents need more room than there is, and each
    took it from another in turn, all would compute their whole prompts again and again, as on stock
    SGLang. So such a request waits while others run, until there is room or the other streams are
    overdue, but for at most :data:`_PATIENCE` times its own work. None overtakes another, because a
    large one would wait for all small ones. Requests without a stream never wait.
    """
    queue, waiting = scheduler.waiting_queue, _to_defer(scheduler, running)
    if not waiting:
        yield
        return
    places = {id(req): place for place, req in enumerate(queue)}
    ids = set(map(id, waiting))
    scheduler.waiting_queue = [req for req in queue if id(req) not in ids]
    scheduler.flashmoa.deferred = waiting
    try:
        yield
    finally:
        scheduler.flashmoa.deferred = []
        left = [*scheduler.waiting_queue, *waiting]
        scheduler.waiting_queue = sorted(left, key=lambda req: places.get(id(req), len(places)))


def _to_defer(scheduler: Any, running: Any) -> list[Any]:
    state: SchedulerState = scheduler.flashmoa
    # The queue may be long.
    if scheduler.enable_priority_scheduling or not state.streams.any_has_lost():
        return []
    lost = [req for req in scheduler.waiting_queue if _has_lost(state, req)]
    if not lost:
        return []
    waiting: list[Any] = []
    taken = state.streams.returning_tokens()
    for req in lost:
        taken += _need(scheduler, req)
        # Overdue streams keep their room where it would not be enough.
        if taken <= unpromised(scheduler, running) + state.streams.overdue_tokens():
            while taken > unpromised(scheduler, running):
                if not state.pins.give_way(state.streams.is_overdue):
                    break
        if taken > unpromised(scheduler, running):
            waiting.append(req)
    others = running.reqs or scheduler.chunked_req is not None
    # One runs, whatever gives way to it.
    return waiting if others or len(waiting) < len(scheduler.waiting_queue) else waiting[1:]


def _has_lost(state: SchedulerState, req: Any) -> bool:
    """Return whether a request's stream has given way, and the request has patience left."""
    mine = state_of(req)
    is_final = mine.mark is not None and mine.mark.final
    if not is_final or req.output_ids or not state.streams.has_lost(mine.stream):
        return False
    return state.work - _queued_at(state, req) < _PATIENCE * total_tokens(req)


def _queued_at(state: SchedulerState, req: Any) -> float:
    """Return the engine's work when a request was first seen in the queue, in prefill tokens."""
    mine = state_of(req)
    if mine.queued_at is None:
        mine.queued_at = state.work
    return mine.queued_at


def make_room(scheduler: Any, running: Any) -> None:
    """Unpin streams until there is room for tokens that SGLang takes without asking.

    These are the rest of a prompt that is cut into chunks, and with priority preemption the largest
    waiting request: SGLang looks for running requests to preempt before it finds out whether there
    is room, and counts pinned KV as used.
    """
    if scheduler.chunked_req is not None:
        # In a mixed batch each running request may begin a page.
        pages = scheduler.page_size * len(running.reqs) if scheduler.is_mixed_chunk else 0
        scheduler.flashmoa.pins.make_room(_rest(scheduler) + pages)
    if scheduler.enable_priority_preemption and scheduler.flashmoa.pins:
        needs = [_need(scheduler, req) for req in scheduler.waiting_queue if not is_increment(req)]
        if needs:
            scheduler.flashmoa.pins.make_room(max(needs) + _promised(scheduler, running))


def unpromised(scheduler: Any, running: Any) -> int:
    """Return how many KV slots running requests leave."""
    return available_tokens(scheduler.tree_cache) - _promised(scheduler, running)


def room_for_streams(scheduler: Any, running: Any) -> int:
    """Return the KV slots that requests leave for increments of streams, in tokens.

    Overdue streams give way to streams that grow. A prompt that is kept warm on a busy engine
    becomes overdue after a while.
    """
    state: SchedulerState = scheduler.flashmoa
    kept = state.streams.returning_tokens()
    for req in chain(scheduler.waiting_queue, state.deferred):
        # The queue may be long, and no stream has room beside requests that fill the pool.
        if kept > scheduler.max_total_num_tokens:
            break
        kept += 0 if is_increment(req) else _need(scheduler, req)
    if running.reqs or len(state.streams) > 1:
        # A share of the pool stays free for requests to come.
        kept += scheduler.max_total_num_tokens // 16
    wanted, _ = state.streams.leading_tokens(inf)
    room = unpromised(scheduler, running) - kept
    while wanted > max(room, 0) and room + state.streams.overdue_tokens() > 0:
        if not state.pins.give_way(state.streams.is_overdue):
            break
        room = unpromised(scheduler, running) - kept
    return room


def has_room_to_ride(scheduler: Any, running: Any, joining: Sequence[Any]) -> bool:
    """Return whether prompts have room to ride along in this step, and to be completed after it.

    SGLang makes room for decodes only in steps that prefill nothing. So the rest of a prompt must
    fit without that, however many tokens the decodes beside it have taken.
    """
    chunked = scheduler.chunked_req
    needs = [_rest(scheduler) if req is chunked else _need(scheduler, req) for req in joining]
    two_steps = 2 * scheduler.page_size * len(running.reqs)
    return available_tokens(scheduler.tree_cache) >= max(needs) + two_steps


def _promised(scheduler: Any, running: Any) -> int:
    """Return the KV slots that SGLang keeps for running requests, in tokens.

    They are for the expected rest of running answers, and for the rest of a chunked prompt.
    """
    answers = sum(
        output_left(req) * RELEASE.reserved_output(scheduler, req) for req in running.reqs
    )
    chunked, rest = scheduler.chunked_req, 0
    if chunked is not None:
        rest = _rest(scheduler) + output_left(chunked)
    # In a mixed batch each running request has a token, too, which may begin a page.
    return ceil(answers) + rest + scheduler.page_size * len(running.reqs)


def _rest(scheduler: Any) -> int:
    chunked = scheduler.chunked_req
    left = total_tokens(chunked) - RELEASE.computed_until(chunked)
    return left + 2 * scheduler.page_size


def _need(scheduler: Any, req: Any) -> int:
    """Return how many free or evictable KV slots a waiting request needs at most, in tokens.

    SGLang requires more than the request takes: a page, and at least one slot that stays free.
    """
    more = output_left(req) + scheduler.page_size + 1
    if state_of(req).stream in scheduler.flashmoa.pins:
        return uncached_tokens(scheduler.tree_cache, req) + more
    # The request's cached prefix may be evictable now, but is not once the request runs.
    return total_tokens(req) + more


def check_decode_memory(
    original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any
) -> bool:
    """Unpin streams before a decode is retracted; wraps ``ScheduleBatch.check_decode_mem``."""
    fits = original(batch, *args, **kwargs)
    state: SchedulerState = batch.tree_cache.flashmoa
    state.work += state.costs.decode_weight
    if fits or not state.pins:
        return fits
    state.pins.make_room(batch.new_tokens_required_next_decode(*args, **kwargs))
    return original(batch, *args, **kwargs)


def prefetch(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Look for no KV of increments in storage; wraps ``Scheduler._prefetch_kvcache``.

    A request waits in the queue while SGLang looks for its KV, but an increment leaves the queue
    after one step, and would never join a batch. A text whose token states are compared gets its
    namespace here, before SGLang looks for its KV anywhere.
    """
    scheduler.flashmoa.token_states.expect(req)
    return None if is_increment(req) else original(scheduler, req, *args, **kwargs)


def order_queue(
    _result: None, policy: Any, waiting_queue: list[Any], *_args: Any, **_kwargs: Any
) -> None:
    """Put increments last, and with ``sjf`` the shortest job first; runs after ``calc_priority``.

    Priorities come before sizes (FlashAgents §6.6).
    """
    state: SchedulerState | None = getattr(policy.tree_cache, "flashmoa", None)
    if state is None:
        return
    # After an increment that finds no room, SGLang would consider no other request.
    waiting_queue.sort(key=is_increment)
    if state.options.schedule != "sjf":
        return
    requests = [req for req in waiting_queue if not is_increment(req)]
    # Matching takes time. Behind 128 requests, the last known number of tokens is good enough.
    for req in requests[:128]:
        state_of(req).uncached = RELEASE.uncached_tokens(policy.tree_cache, req)
    step = state.costs.decode_weight

    def key(req: Any) -> tuple[int, float]:
        has_priority = policy.enable_priority_scheduling
        priority = policy.priority_sign * req.priority if has_priority else 0
        return priority, place(state, req, step)

    waiting_queue[: len(requests)] = sorted(requests, key=key)


def place_of_next(scheduler: Any) -> float:
    """Return the place of the request that is served next.

    Streams whose requests would come before it lead. It is infinite if nothing waits, or if jobs
    are not ordered by their sizes.
    """
    state: SchedulerState = scheduler.flashmoa
    if state.options.schedule != "sjf":
        return inf
    step = state.costs.decode_weight
    waiting = (req for req in scheduler.waiting_queue if not is_increment(req))
    return min((place(state, req, step) for req in waiting), default=inf)


def place(state: SchedulerState, req: Any, step: float) -> float:
    """Return a request's place in shortest-job-first order, in prefill tokens.

    It is the size of the job, its prefill and its expected decode steps, plus the engine's work
    when the request was queued. So shorter jobs overtake a job for at most the time that the job
    takes itself, and none starves.

    Args: step: the time of a decode step, as a number of prefill tokens.
    """
    mine = state_of(req)
    expected = mine.mark.expected_output if mine.mark is not None else None
    output = req.sampling_params.max_new_tokens if expected is None else expected
    left = max(0, (output or 0) - len(req.output_ids))
    uncached = total_tokens(req) if mine.uncached is None else mine.uncached
    return _queued_at(state, req) + uncached + step * left
