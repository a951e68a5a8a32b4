"""Decides which requests go first, which wait, and how much of a step prompt streams may take.

Decisions depend on tokens, steps and the measured costs of steps, and never on a clock, so that
tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs

# Seconds for which a forward for streams may hold up a request that arrives during it.
_DELAY = 0.35
_LEAST_CHUNK, _LARGEST_CHUNK = 128, 8192
# The fewest tokens of streams that ride along with a decode step.
_LEAST_RIDE = 32
# The fewest decode steps between two forwards for streams alone.
_LEAST_PAUSE = 256
# The most steps in which a request is held back.
HELD_STEPS = 16
# Final requests with at most this many tokens left to compute are never held back for others.
_LITTLE_LEFT = 128
# Estimated seconds of a step in which nothing runs, and seconds that the scheduler sleeps in it.
IDLE_STEP, IDLE_SLEEP = 0.0025, 0.002


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """The properties of a waiting request that decide about its turn; sizes in tokens.

    Attributes:
        stream: the prompt stream to which it belongs, if any.
        increment: whether it is an increment of the stream, so that no client waits for its answer.
        late: of a final request, how much it has left to compute; otherwise ``None``.
        length: length of its prompt.
        held: number of steps in which it was held back.
    """

    stream: Hashable = None
    increment: bool = False
    late: int | None = None
    length: int = 0
    held: int = 0


def find_superseded(queue: Sequence[WaitingRequest]) -> set[int]:
    """Return the positions of increments that another request in the queue makes pointless.

    That is a longer increment of the same stream, or its final request.
    """
    ranks = [(not request.increment, request.length) for request in queue]
    newest: dict[Hashable, tuple[bool, int]] = {}
    for request, rank in zip(queue, ranks, strict=True):
        newest[request.stream] = max(rank, newest.get(request.stream, rank))
    return {
        position
        for position, (request, rank) in enumerate(zip(queue, ranks, strict=True))
        if request.increment and request.stream is not None and rank < newest[request.stream]
    }


def choose_held_back(queue: Sequence[WaitingRequest]) -> set[int]:
    """Return the positions of requests to hold back in this step; none is held back for long.

    Increments are held back while a request is queued whose client waits. Final requests that have
    much left to compute are held back while others have little left: in one batch, the request
    whose stream is ready would have to wait for the request whose stream is not.
    """
    increments = {position for position, request in enumerate(queue) if request.increment}
    held = increments if len(increments) < len(queue) else set[int]()
    late = {
        position: request.late
        for position, request in enumerate(queue)
        if request.late is not None and not request.increment
    }
    if len(late) > 1:
        bound = max(_LITTLE_LEFT, 2 * min(late.values()))
        held |= {position for position, left in late.items() if left > bound}
    return {position for position in held if queue[position].held < HELD_STEPS}


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


def chunk_tokens(costs: Costs, page: int) -> int:
    """Return the most tokens in a forward for streams alone, in whole pages."""
    tokens = min(max(costs.tokens_within(_DELAY), _LEAST_CHUNK), _LARGEST_CHUNK)
    return max(page, tokens - tokens % page)


def ride_tokens(costs: Costs, decoding: int, share: float, page: int) -> int:
    """Return how many tokens of streams may ride along with a decode step, in whole pages.

    The time that they add is at most ``share`` of the longer step. Return 0 if that allows only for
    few tokens: then an occasional forward for streams alone is more efficient.
    """
    longest = costs.decode(decoding) / (1 - share) if share < 1 else float("inf")
    tokens = costs.tokens_within(longest) - decoding
    tokens -= tokens % page
    return tokens if tokens >= _LEAST_RIDE else 0


def pause_steps(costs: Costs, tokens: int, decoding: int, share: float) -> int:
    """Return how many decode steps follow a forward of ``tokens`` tokens for streams alone.

    With them, such forwards take at most ``share`` of the time and hold up at most one step in 256.
    """
    if share >= 1:
        return 0
    cost, step = costs.prefill(tokens), max(costs.decode(decoding), 1e-9)
    return max(_LEAST_PAUSE, ceil(cost * (1 - share) / share / step))


class SaturationGate:
    """Holds prefills back until there are enough for a forward that hides transfers of experts.

    This is the admission of MoE-Prefill §7.4.

    Args:
        tokens: number of tokens that make a forward worth running.
        longest_wait: the most seconds for which a request is held back, in total.
    """

    def __init__(self, tokens: int, longest_wait: float) -> None:
        self.tokens = tokens
        self._longest_wait = longest_wait
        # The seconds for which each request in the queue has been held back.
        self._held: dict[str, float] = {}

    def holds(self, queue: Sequence[str], tokens: int, room: int, step: float) -> bool:
        """Decide whether the whole queue waits in this step.

        Args:
            queue: ids of the waiting requests.
            tokens: number of tokens that they have to compute.
            room: number of requests that could start.
            step: seconds that this step will take.
        """
        self._held = {rid: self._held.get(rid, 0.0) for rid in queue}
        if not queue or len(queue) >= room or tokens >= self.tokens:
            return False
        held = {rid: seconds + step for rid, seconds in self._held.items()}
        if max(held.values()) > self._longest_wait:
            return False
        self._held = held
        return True
