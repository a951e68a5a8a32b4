"""Which waiting requests join a batch: their order, and their room in the KV pool.

Requests of clients come first, and increments of streams get what these leave.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    from flashmoa_sglang.costs import Costs
    from flashmoa_sglang.scheduler.state import SchedulerState

# The share of the KV pool that increments leave free for requests to come, unless there is only one
# stream and no request.
_HEADROOM = 1 / 16
# A request whose prompt gave way waits while the engine does so many times the work of the prompt.
_PATIENCE = 32
# Matching a prompt with the radix tree takes time. After this many requests of the queue, the last
# known number of uncached tokens is good enough.
_MATCHED_JOBS = 128


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a request to a batch, with the tokens that it shares; unpin streams if it has no room.

    Wraps ``PrefillAdder.add_one_req``, where SGLang counts what the requests before this one in the
    batch take. So any number of requests find the room that streams hold.
    """
    state: SchedulerState | None = getattr(adder.tree_cache, "flashmoa", None)
    if state is None:
        return original(adder, req, *args, **kwargs)
    if state.needs_pages:
        RELEASE.reserve_pages(adder)
        state.needs_pages = False
    shared, mark = state.shared, state_of(req).mark
    if mark is not None and not mark.final:
        # SGLang takes a prefill that is sent to no decode engine for a warm-up of its own, whose KV
        # it does not keep.
        req.skip_radix_cache_insert = False

    def ask() -> Any:
        if shared is None:
            return original(adder, req, *args, **kwargs)
        return shared.admit(lambda: original(adder, req, *args, **kwargs), adder, req)

    def joined() -> bool:
        return bool(adder.can_run_list) and adder.can_run_list[-1] is req

    if is_increment(req):
        return _admit_increment(ask, adder, req)
    result = ask()
    if kwargs.get("has_chunked_req"):
        # SGLang can cut one prompt at a time, and would cut this one if streams gave way now.
        return result
    while lacks_room(result) and state.pins.give_way():
        if joined():
            result = adder.budget_state()
            continue
        # SGLang may count how often a request found no room. So streams give way until it will find
        # some, before it is admitted again.
        uncached = total_tokens(req) - RELEASE.cached_tokens(req)
        needs = uncached + output_left(req) + adder.page_size
        while adder.rem_total_tokens <= needs and state.pins.give_way():
            pass
        result = ask()
    return result


def lacks_room(result: Any) -> bool:
    """Return whether ``PrefillAdder.add_one_req`` says that the KV pool is short."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return result == AddReqResult.NO_TOKEN


def _admit_increment(ask: Callable[[], Any], adder: Any, req: Any) -> Any:
    """Add an increment to the batch, if all of it fits.

    If the forward has no room for it, SGLang would cut it into chunks, and compute the rest before
    requests of clients. If the KV pool has no room, SGLang would take the batch for full. Each has
    the prefix of its stream, which SGLang is not to count as hits of its cache.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    left = adder.rem_chunk_tokens
    if left is not None and total_tokens(req) - RELEASE.cached_tokens(req) > left:
        return AddReqResult.OTHER
    counts = {name: hits for name, hits in vars(adder).items() if name.endswith("hit_tokens")}
    result = ask()
    vars(adder).update(counts)
    return AddReqResult.OTHER if lacks_room(result) else result


def allocatable_requests(
    original: Callable[..., int], scheduler: Any, *args: Any, **kwargs: Any
) -> int:
    """Return how many requests may join a batch; wraps ``Scheduler.get_num_allocatable_reqs``.

    Increments do not count as running requests, since they end with their forward.
    """
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    if state is not None and state.only_streams:
        return scheduler.req_to_token_pool.available_size()
    return original(scheduler, *args, **kwargs)


@contextmanager
def held_back(scheduler: Any, running: Any) -> Generator[None]:
    """Take requests out of the queue for which prompts of others would have to give way.

    These are requests whose own prompts gave way. If agents need more room than there is, each
    that took it from another would only take it in turn: all of them would compute their whole
    prompts again and again, as on stock SGLang. So they wait while others run, until there is room
    or the others' requests are overdue, but for at most :data:`_PATIENCE` times the work that they
    are themselves. None overtakes another: a large one would wait for all small ones. Requests
    without a stream never wait.
    """
    queue, back = scheduler.waiting_queue, _to_hold_back(scheduler, running)
    if not back:
        yield
        return
    hidden = {id(req) for req in back}
    scheduler.waiting_queue = [req for req in queue if id(req) not in hidden]
    scheduler.flashmoa.held_back = back
    places = {id(req): place for place, req in enumerate(queue)}
    try:
        yield
    finally:
        scheduler.flashmoa.held_back = []
        left = [*scheduler.waiting_queue, *back]
        scheduler.waiting_queue = sorted(left, key=lambda req: places.get(id(req), len(places)))


def _to_hold_back(scheduler: Any, running: Any) -> list[Any]:
    state: SchedulerState = scheduler.flashmoa
    lost = [req for req in scheduler.waiting_queue if _has_lost(state, req)]
    if not lost or scheduler.enable_priority_scheduling:
        return []

    def room() -> int:
        return unpromised(scheduler, running) - state.streams.returning_tokens()

    back: list[Any] = []
    taken = 0
    for req in lost:
        need = _need(scheduler, req)
        # Prompts that would not be enough stay where they are.
        if need <= room() - taken + state.streams.overdue_tokens():
            while need > room() - taken and state.pins.give_way(state.streams.is_overdue):
                pass
        if need > room() - taken:
            back.append(req)
        taken += need
    others = running.reqs or scheduler.chunked_req is not None
    # One runs, whatever gives way to it.
    return back if others or len(back) < len(scheduler.waiting_queue) else back[1:]


def _has_lost(state: SchedulerState, req: Any) -> bool:
    """Return whether a request's stream has given way, and the request has patience left."""
    mine = state_of(req)
    is_final = mine.mark is not None and mine.mark.final
    if not is_final or req.output_ids or not state.streams.has_lost(mine.stream):
        return False
    if mine.queued_at is None:
        mine.queued_at = state.work
    return state.work - mine.queued_at < _PATIENCE * total_tokens(req)


def make_room(scheduler: Any, running: Any) -> None:
    """Unpin streams until there is room for what SGLang takes without asking for it.

    That is the rest of a prompt that is cut into chunks, and with priority preemption the largest
    waiting request: SGLang looks for running requests to preempt before it finds out whether there
    is room, and counts KV that streams hold as used.
    """
    if scheduler.chunked_req is not None:
        # In a mixed batch each running request may begin a page.
        pages = scheduler.page_size * len(running.reqs) if scheduler.is_mixed_chunk else 0
        scheduler.flashmoa.pins.make_room(_rest(scheduler) + pages)
    if not scheduler.enable_priority_preemption:
        return
    needs = [_need(scheduler, req) for req in scheduler.waiting_queue if not is_increment(req)]
    if needs:
        scheduler.flashmoa.pins.make_room(max(needs) + _promised(scheduler, running))


def unpromised(scheduler: Any, running: Any) -> int:
    """Return the KV slots that running requests leave, in tokens."""
    return available_tokens(scheduler.tree_cache) - _promised(scheduler, running)


def room_for_streams(scheduler: Any, running: Any) -> int:
    """Return the KV slots that requests leave for increments of streams, in tokens.

    Prompts that are held give way to streams that grow once they are overdue, as one that is kept
    warm is after a while on a busy engine.
    """
    state: SchedulerState = scheduler.flashmoa
    waiting = [req for req in scheduler.waiting_queue if not is_increment(req)]
    kept = sum(_need(scheduler, req) for req in [*waiting, *state.held_back])
    kept += state.streams.returning_tokens()
    if running.reqs or len(state.streams) > 1:
        kept += int(scheduler.max_total_num_tokens * _HEADROOM)
    wanted, _ = state.streams.leading_tokens(inf)
    room = unpromised(scheduler, running) - kept
    while wanted > max(room, 0) and room + state.streams.overdue_tokens() > 0:
        if not state.pins.give_way(state.streams.is_overdue):
            break
        room = unpromised(scheduler, running) - kept
    return room


def has_room_to_ride(scheduler: Any, running: Any, joining: Sequence[Any]) -> bool:
    """Return whether prompts have room enough to ride in this step, and to be completed after it.

    SGLang makes room for decodes only in steps that prefill nothing. So the rest of a prompt must
    fit without that, however many tokens the decodes beside it have taken.
    """
    chunked = scheduler.chunked_req
    needs = [_need(scheduler, req) for req in joining if req is not chunked]
    if chunked is not None:
        needs.append(_rest(scheduler))
    two_steps = 2 * scheduler.page_size * len(running.reqs)
    return available_tokens(scheduler.tree_cache) >= max(needs) + two_steps


def _promised(scheduler: Any, running: Any) -> int:
    """Return the KV slots that SGLang keeps for running requests, in tokens.

    They are for the expected rest of the answers that are being decoded, and for the rest of a
    prompt that is cut into chunks.
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
    """Return how many free KV slots the rest of the prompt needs that is cut into chunks."""
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
    # The request's cached prefix may be evictable now, but is not any more once the request runs.
    return total_tokens(req) + more


def check_decode_memory(
    original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any
) -> bool:
    """Unpin streams before a decode is retracted; wraps ``ScheduleBatch.check_decode_mem``."""
    fits = original(batch, *args, **kwargs)
    state: SchedulerState | None = getattr(batch.tree_cache, "flashmoa", None)
    if state is None:
        return fits
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
    after one step, and would never join a batch.
    """
    return None if is_increment(req) else original(scheduler, req, *args, **kwargs)


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


def place_of_next(scheduler: Any) -> float:
    """Return the place in the queue of the request that is served next, as a size of work.

    Streams whose requests would come before it lead (``SchedulerStreams._job``). It is infinite if
    nothing waits, or if jobs are not ordered by their sizes.
    """
    state: SchedulerState = scheduler.flashmoa
    if state.options.schedule != "sjf":
        return inf
    jobs = (
        _job(scheduler.policy, state, req, matched=False)
        for req in scheduler.waiting_queue
        if not is_increment(req)
    )
    return min((_place(job, state.costs.decode_weight) for job in jobs), default=inf)


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


@dataclass(frozen=True, slots=True)
class Job:
    """A request for shortest-job-first order.

    ``uncached``: number of prompt tokens to compute. ``output``: number of tokens that it is
    expected to decode. ``queued_at``: the work that the engine had done when it was queued, in
    prefill tokens. ``priority``: requests with a smaller one go first.
    """

    uncached: int
    output: int
    queued_at: float
    priority: int = 0


def shortest_first(jobs: Sequence[Job], costs: Costs) -> list[int]:
    """Return the positions of jobs in the order in which to serve them (FlashAgents §6.6).

    A job's size is its prefill and its decode steps, in prefill tokens. It counts less the more
    work the engine has done since the job was queued: shorter jobs can overtake a job for at most
    the time that the job takes itself, so that none starves. Priorities come before sizes.
    """
    step = costs.decode_weight
    return sorted(range(len(jobs)), key=lambda n: (jobs[n].priority, _place(jobs[n], step), n))


def _place(job: Job, step: float) -> float:
    return job.queued_at + job.uncached + step * job.output
