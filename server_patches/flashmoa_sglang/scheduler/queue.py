"""Orders the requests that wait for a prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.request import is_increment, state_of, total_tokens

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs
    from flashmoa_sglang.scheduler.state import SchedulerState

# Matching a prompt with the radix tree takes time. After this many requests of the queue, the last
# known number of uncached tokens is good enough.
_MATCHED_JOBS = 128


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

    def key(position: int) -> tuple[int, float, int]:
        job = jobs[position]
        return job.priority, job.queued_at + job.uncached + step * job.output, position

    return sorted(range(len(jobs)), key=key)
