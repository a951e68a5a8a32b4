"""Who goes first, and how much of a step prompt streams may take: pure decisions.

Counted in tokens and steps, never in seconds that pass: tensor-parallel ranks decide alike.
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
_LEAST_RIDE = 32
_RARELY = 256
# A request is passed over at most this many times.
HELD_STEPS = 16
LITTLE_LEFT = 128


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting request, as far as its turn is concerned; sizes in tokens.

    ``stream``: the prompt stream it belongs to. ``increment``: it prefills the stream, and
    nobody waits for its answer; ``late``: it uses the stream and has this much left to
    compute. ``length``: of its prompt. ``held``: steps it has been passed over.
    """

    stream: Hashable = None
    increment: bool = False
    late: int | None = None
    length: int = 0
    held: int = 0


def superseded(queue: Sequence[Waiting]) -> set[int]:
    """Increments made pointless by a longer one, or by the request that uses their stream.

    Returns positions.
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
    """Requests to pass over in this step; positions.

    Increments, while a request that somebody waits for is queued. And requests with much
    left, while others of streams have little: in one batch, the one whose stream is ready
    would wait for the one whose stream is not. Nobody is passed over for long.
    """
    real = [position for position, waiting in enumerate(queue) if not waiting.increment]
    held = set[int]()
    if real:
        held = {position for position, waiting in enumerate(queue) if waiting.increment}
    lefts = {position: queue[position].late for position in real}
    finals = {position: left for position, left in lefts.items() if left is not None}
    if len(finals) > 1:
        bound = max(LITTLE_LEFT, 2 * min(finals.values()))
        held |= {position for position, left in finals.items() if left > bound}
    return {position for position in held if queue[position].held < HELD_STEPS}


@dataclass(frozen=True, slots=True)
class Job:
    """A request as a job.

    ``uncached``: prompt tokens to compute. ``output``: tokens it is expected to generate.
    ``queued_at``: the engine's work, in prefill tokens, when it was queued. ``priority``:
    smaller goes first.
    """

    uncached: int
    output: int
    queued_at: float
    priority: int = 0


def shortest_first(jobs: Sequence[Job], costs: Costs) -> list[int]:
    """The order in which to serve: positions, shortest job first (FlashAgents §6.6).

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
    """The most tokens of streams in a forward of their own, in whole pages."""
    tokens = min(max(costs.tokens_within(_DELAY), _LEAST_CHUNK), _LARGEST_CHUNK)
    return max(page, tokens - tokens % page)


def ride_tokens(costs: Costs, decoding: int, share: float, page: int) -> int:
    """How many tokens of streams may ride along with one decode step, in whole pages.

    As many as make the step longer by no more than ``share`` of the longer step. 0 where
    that is too few to be worth it: such an engine does better with a forward for streams
    alone now and then.
    """
    longest = costs.decode(decoding) / (1 - share) if share < 1 else float("inf")
    tokens = costs.tokens_within(longest) - decoding
    tokens -= tokens % page
    return tokens if tokens >= _LEAST_RIDE else 0


def pause_steps(costs: Costs, tokens: int, decoding: int, share: float) -> int:
    """Decode steps that others get after a forward of ``tokens`` for streams alone.

    Enough for its share, and so many that at most one step in 256 is held up.
    """
    if share >= 1:
        return 0
    cost, step = costs.prefill(tokens), max(costs.decode(decoding), 1e-9)
    return max(_RARELY, ceil(cost * (1 - share) / share / step))
