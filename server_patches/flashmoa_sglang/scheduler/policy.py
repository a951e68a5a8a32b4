"""Decides which requests go first, which wait, and how much of a step prompt streams may take.

Decisions depend on tokens, steps and the measured costs of steps, and never on a clock, so that
tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs

# A forward is large enough if a token costs at most this factor of what it costs in larger ones,
# and small enough to be as good as empty if it costs at most this factor of one with one token.
_TOLERANCE = 1.1
_LEAST_CHUNK, _LARGEST_CHUNK = 128, 8192
# Where much waits, a forward is up to this many times as large: what little each doubling saves
# adds up. Of Qwen3-32B on an A100, 16,000 tokens take 6.3 s in forwards of 256 tokens, 5.6 s in
# these, and 5.5 s in as few as possible.
_LARGER = 8
# The bounds of how few tokens of all streams together are worth a forward.
_SMALLEST_LEAST, _LARGEST_LEAST = 32, 128
# The fewest tokens in an increment that does not complete its stream: SGLang's scheduler takes a
# millisecond or two for each. Streams that end together are left with that many each, which their
# requests compute in one forward.
_LEAST_INCREMENT = 16
# Many streams have fewer and larger increments, so that the scheduler makes at most one in two of
# an H200's steps of 5 ms, in which a stream of 50 tokens a second grows by a quarter of a token.
_TOKENS_PER_STREAM = 0.5
# Estimated seconds of a step in which nothing runs, and seconds that the scheduler sleeps in it.
IDLE_STEP, IDLE_SLEEP = 0.0025, 0.002


@dataclass(slots=True)
class Growth:
    """How far a prompt stream could be prefilled; sizes in tokens.

    It is not frozen, because there may be one for each of hundreds of streams in each step, and
    frozen objects take several times as long to make.

    Attributes:
        prefilled: number of tokens that have KV, in whole pages.
        new: number of tokens that have none, in whole pages.
        ended: whether no more tokens come.
        output: the decode steps of the stream's request, in prefill tokens, if jobs are ordered by
            their sizes.
    """

    prefilled: int
    new: int
    ended: bool = False
    output: float = 0.0


def choose_increments(
    streams: Sequence[Growth], tokens: int, least: int, fewest: int, page: int
) -> list[tuple[int, int]]:
    """Choose which streams to prefill in a step, and how far.

    First come those of which the step can compute all, the smallest job first. The others are
    computed one after the other, so that if there is not room for all, some are complete: the
    smallest job first, or without ``output`` the one that was opened first, whose request may come
    first. Increments are whole pages.

    Args:
        streams: in the order in which they were opened.
        tokens: the most tokens of all increments together.
        least: the fewest new tokens of all streams together, unless one has ended.
        fewest: the fewest tokens of an increment that does not complete its stream, or ``tokens``
            if that is less; see :func:`fewest_tokens`.
        page: number of tokens in a KV page.

    Return the chosen streams' positions and the number of tokens that have KV afterwards.
    """
    if sum(s.new for s in streams) < least and not any(s.ended and s.new for s in streams):
        return []
    fewest = max(min(fewest, tokens - tokens % page), min(_LEAST_INCREMENT, least))
    chosen: list[tuple[int, int]] = []
    whole_step = tokens

    def order(position: int) -> tuple[bool, float, int]:
        stream = streams[position]
        lasts = stream.new > whole_step
        size = 0.0 if lasts and not stream.output else stream.new + stream.output
        return lasts, size, position

    for position in sorted(range(len(streams)), key=order):
        if tokens < page:
            break
        stream = streams[position]
        count = min(stream.new, tokens)
        count -= count % page
        completes = stream.ended and count == stream.new
        if count and (completes or count >= fewest):
            chosen.append((position, stream.prefilled + count))
            tokens -= count
    return chosen


def fewest_tokens(streams: int, least: int) -> int:
    """Return the fewest tokens of an increment while so many streams are open.

    Args: least: the fewest tokens of all streams together.
    """
    return min(least, max(_LEAST_INCREMENT, int(_TOKENS_PER_STREAM * streams)))


def stream_chunk(costs: Costs, waiting: int, page: int) -> int:
    """Return the most tokens in a forward for streams alone, while nothing else runs.

    A request that comes waits for the end of this forward. So it has half of the ``waiting``
    tokens, but at least as many as make it efficient, and at most :data:`_LARGER` times as many.
    It is larger if the rest would not be worth another forward.
    """
    size = _LEAST_CHUNK
    while size < _LARGEST_CHUNK and 2 * costs.prefill(size) > _TOLERANCE * costs.prefill(2 * size):
        size *= 2
    size = max(size, min(waiting // 2, _LARGER * size, _LARGEST_CHUNK))
    if size < waiting < size + least_tokens(costs, page):
        size = waiting
    return max(page, size - size % page)


def least_tokens(costs: Costs, page: int) -> int:
    """Return the fewest tokens of streams that are worth a forward, or riding along with one.

    If fewer are left for the final request, its forward takes hardly longer than without them.
    """
    return max(page, _SMALLEST_LEAST, min(_nearly_free_tokens(costs), _LARGEST_LEAST))


def _nearly_free_tokens(costs: Costs) -> int:
    """Return how many tokens a forward has that takes hardly longer than one with very few."""
    return costs.tokens_within(_TOLERANCE * costs.prefill(_SMALLEST_LEAST))


def fill_tokens(costs: Costs, prefilling: int, page: int) -> int:
    """Return how many tokens of streams join a forward that prefills for clients.

    The forward takes hardly longer with them, if it is so small that its tokens do not fill it.
    """
    tokens = max(0, _nearly_free_tokens(costs) - prefilling)
    return tokens - tokens % page


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
