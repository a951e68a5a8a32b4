"""Which requests go first, which wait, and how much of a step prompt streams may take.

These are pure decisions. They count tokens, steps and what steps are known to take, and never look
at a clock, so that tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs

# Seconds that a forward for streams may hold up a request that comes meanwhile.
_DELAY = 0.35
_LEAST_CHUNK, _LARGEST_CHUNK = 128, 8192
# Fewer tokens of streams than this do not ride along with a decode step.
_LEAST_RIDE = 32
# Decode steps, at least, between two forwards for streams alone.
_LEAST_PAUSE = 256
# A request is passed over at most this many times.
HELD_STEPS = 16
# Requests with no more uncached tokens than this never wait for those with fewer.
_LITTLE_LEFT = 128
# Seconds of a step in which nothing runs, and how long of them the scheduler sleeps.
IDLE_STEP, IDLE_SLEEP = 0.0025, 0.002


@dataclass(frozen=True, slots=True)
class Waiting:
    """What decides about a waiting request's turn; sizes in tokens.

    ``stream``: the prompt stream it belongs to. ``increment``: it prefills the stream, and no
    client waits for its answer; ``late``: it uses the stream and has this much left to
    compute. ``length``: of its prompt. ``held``: steps in which it was passed over.
    """

    stream: Hashable = None
    increment: bool = False
    late: int | None = None
    length: int = 0
    held: int = 0


def superseded(queue: Sequence[Waiting]) -> set[int]:
    """Return the positions of increments that a later request makes pointless.

    That is a longer increment, or the request that uses their stream.
    """
    ranks = [(not waiting.increment, waiting.length) for waiting in queue]
    newest: dict[Hashable, tuple[bool, int]] = {}
    for waiting, rank in zip(queue, ranks, strict=True):
        newest[waiting.stream] = max(rank, newest.get(waiting.stream, rank))
    return {
        position
        for position, (waiting, rank) in enumerate(zip(queue, ranks, strict=True))
        if waiting.increment and waiting.stream is not None and rank < newest[waiting.stream]
    }


def held_back(queue: Sequence[Waiting]) -> set[int]:
    """Return the positions of requests to pass over in this step; none is passed over for long.

    Increments are, while a request whose client waits is queued. So are requests that use a stream
    and have much left to compute, while others that use one have little: in one batch, the request
    whose stream is ready would wait for the one whose stream is not.
    """
    increments = {position for position, waiting in enumerate(queue) if waiting.increment}
    held = increments if len(increments) < len(queue) else set[int]()
    late = {
        position: waiting.late
        for position, waiting in enumerate(queue)
        if waiting.late is not None and not waiting.increment
    }
    if len(late) > 1:
        bound = max(_LITTLE_LEFT, 2 * min(late.values()))
        held |= {position for position, left in late.items() if left > bound}
    return {position for position in held if queue[position].held < HELD_STEPS}


@dataclass(frozen=True, slots=True)
class Job:
    """A request in a shortest-job-first order.

    ``uncached``: prompt tokens to compute. ``output``: tokens it is expected to generate.
    ``queued_at``: the engine's work, in prefill tokens, when it was queued. ``priority``:
    smaller goes first.
    """

    uncached: int
    output: int
    queued_at: float
    priority: int = 0


def shortest_first(jobs: Sequence[Job], costs: Costs) -> list[int]:
    """Return the positions in the order in which to serve: shortest job first (FlashAgents §6.6).

    A job's size is its prefill and its decode steps, in prefill tokens. It ages by the work
    the engine has done meanwhile: a job is overtaken by shorter ones for at most as long as
    it would take itself, so none starves. Priorities go before sizes.
    """
    step = costs.decode_weight

    def key(position: int) -> tuple[int, float, int]:
        job = jobs[position]
        return job.priority, job.queued_at + job.uncached + step * job.output, position

    return sorted(range(len(jobs)), key=key)


def chunk_tokens(costs: Costs, page: int) -> int:
    """Return the most tokens of streams in a forward of their own, in whole pages."""
    tokens = min(max(costs.tokens_within(_DELAY), _LEAST_CHUNK), _LARGEST_CHUNK)
    return max(page, tokens - tokens % page)


def ride_tokens(costs: Costs, decoding: int, share: float, page: int) -> int:
    """Return how many tokens of streams may ride along with one decode step, in whole pages.

    They make the step longer by no more than ``share`` of the longer step. 0 where that is too few
    to be worth it: such an engine does better with a forward for streams alone now and then.
    """
    longest = costs.decode(decoding) / (1 - share) if share < 1 else float("inf")
    tokens = costs.tokens_within(longest) - decoding
    tokens -= tokens % page
    return tokens if tokens >= _LEAST_RIDE else 0


def pause_steps(costs: Costs, tokens: int, decoding: int, share: float) -> int:
    """Return how many decode steps follow a forward of ``tokens`` for streams alone.

    They are enough for its ``share`` of the time, and so many that at most one step in 256 is held
    up.
    """
    if share >= 1:
        return 0
    cost, step = costs.prefill(tokens), max(costs.decode(decoding), 1e-9)
    return max(_LEAST_PAUSE, ceil(cost * (1 - share) / share / step))


class SaturationGate:
    """Holds prefills back until a forward of them hides the transfers of experts.

    MoE-Prefill §7.4: admission.

    Args:
        tokens: a forward with as many is worth running.
        longest_wait: seconds that a request is held back at most, all in all.
    """

    def __init__(self, tokens: int, longest_wait: float) -> None:
        self.tokens = tokens
        self._longest_wait = longest_wait
        # Of those in the queue: seconds they were held back.
        self._held: dict[str, float] = {}

    def holds(self, queue: Sequence[str], tokens: int, room: int, step: float) -> bool:
        """Decide whether the whole queue waits in this step, which will take ``step`` seconds.

        Args:
            queue: ids of the waiting requests. tokens: that they have to compute.
            room: how many of them could run.
        """
        self._held = {rid: self._held.get(rid, 0.0) for rid in queue}
        if not queue or len(queue) >= room or tokens >= self.tokens:
            return False
        held = {rid: seconds + step for rid, seconds in self._held.items()}
        if max(held.values()) > self._longest_wait:
            return False
        self._held = held
        return True
