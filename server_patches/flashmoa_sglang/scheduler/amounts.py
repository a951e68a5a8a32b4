"""How many tokens a step prefills, and of which streams: the rules alone, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING

from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs

# A forward with more tokens is as good as one with few if it takes at most this factor of the time.
TOLERANCE = 1.1
# Sizes of forwards for streams alone.
CHUNKS = tuple(2**n for n in range(6, 14))
# The bounds of how few tokens of all streams together are worth a forward.
_SMALLEST_LEAST, _LARGEST_LEAST = 32, 128
# The fewest tokens in an increment that does not complete its stream: SGLang's scheduler takes a
# millisecond or two for each. Streams that end together are left with that many each, which their
# requests compute in one forward.
_LEAST_INCREMENT = 16
# Many streams have fewer and larger increments, so that the scheduler makes at most one in two of
# an H200's steps of 5 ms, in which a stream of 50 tokens a second grows by a quarter of a token.
_TOKENS_PER_STREAM = 0.5
# The rank of streams that are no reason for a step, but may fill it.
FILLS = 2
# A number of tokens that may ride, and the seconds by which they lengthen the step.
Ride = tuple[int, float]


@lru_cache(maxsize=1024)
def possible_rides(
    costs: Costs, decoding: int, budget: float, page: int, most: int
) -> tuple[Ride, ...]:
    """Return the numbers of tokens that may ride along with a decode step.

    With the decodes, they fill the step up to one of :data:`STEP_SIZES`, or to so many tokens more
    than a multiple of the largest. Each comes with the seconds that it adds, the smallest first.

    Args:
        decoding: number of requests that decode.
        budget: the longest step, as a multiple of the step without them.
        most: the most tokens that a forward may prefill (``--chunked-prefill-size``).
    """
    if budget <= 1:
        return ()
    longest = (budget - 1) * costs.decode(decoding)
    below = decoding - decoding % STEP_SIZES[-1]
    steps = (start + size for start in (below, below + STEP_SIZES[-1]) for size in STEP_SIZES)
    rides = sorted({step - decoding - (step - decoding) % page for step in steps})
    added = ((ride, costs.added(decoding, ride)) for ride in rides if FEWEST_RIDING <= ride <= most)
    return tuple((ride, seconds) for ride, seconds in added if seconds <= longest)


def choose_prompt_ride(
    rides: Sequence[Ride], costs: Costs, decoding: int, prompts: int, tokens: int
) -> int:
    """Return how many tokens of requests' prompts ride along with a decode step; 0: none.

    Prompts that do not ride have a forward of their own, for which the decodes wait. Prompts that
    ride take longer, because each of their steps decodes, too. The way is the one in which all
    these requests together wait for the shortest time, as measured.

    Args:
        rides: see :func:`possible_rides`.
        decoding: number of requests that decode.
        prompts: number of requests that could start.
        tokens: how many tokens of these are to be computed, in all.
    """
    step = costs.decode(decoding)

    def waited(ride: int, added: float) -> float:
        return ceil(tokens / ride) * (prompts * (step + added) + decoding * added)

    best, added = min(rides, key=lambda ride: waited(*ride), default=(0, 0.0))
    alone = (prompts + decoding) * costs.prefill(tokens)
    return best if best and waited(best, added) < alone else 0


def choose_stream_ride(
    rides: Sequence[Ride],
    rate: float,
    waiting: Sequence[int],
    ends: Sequence[int],
    fewest: int = 0,
    short: tuple[float, float] = (inf, 1.0),
) -> Ride:
    """Return how many tokens of streams ride along with a decode step: those that save the most.

    Tokens that do not ride are prefilled later at the rate of a large forward, in which no request
    decodes. Few tokens in each of many steps cost less than many tokens in a few, as long as there
    are enough steps. When a request ends, the request of an agent that reads it may come. So the
    tokens of the first stream should ride until the first request ends, and so on.

    Args:
        rides: see :func:`possible_rides`.
        rate: seconds of a token in a large forward.
        waiting: how many tokens of each stream wait, in the order in which they ride.
        ends: in how many steps each of the requests ends that decode, in any order.
        fewest: if any ride, at least this many do, if the rides allow it: fewer times then.
        short: rides that add more seconds than the first number do so in a smaller share of the
            steps, which is the second.
    """
    total, ends = sum(waiting), sorted(ends)

    def seconds(ride: int, added: float) -> float:
        pace = ride if added <= short[0] else ride * short[1]
        late = _late_tokens(waiting, ends, pace) if total > pace * ends[0] else 0
        return max(1.0, (total - late) / ride) * added + late * rate

    best = min(rides, key=lambda ride: seconds(*ride), default=(0, 0.0))
    if not best[0] or seconds(*best) >= total * rate:
        return 0, 0.0
    return max(best, next((ride for ride in rides if ride[0] >= fewest), rides[-1]))


def _late_tokens(waiting: Sequence[int], ends: Sequence[int], ride: float) -> float:
    """Return how many tokens of streams have not ridden when the requests come that need them.

    Args:
        ends: the steps after which requests come, ascending.
        ride: how many tokens ride along with a step on average.
    """
    queued = late = 0.0
    for tokens, end in zip(waiting, ends, strict=False):
        queued += tokens
        left = max(0.0, queued - ride * end)
        queued, late = queued - left, late + left
    # The last request to end is that of all further streams.
    return late + max(0.0, queued + sum(waiting[len(ends) :]) - ride * ends[-1])


def stream_chunk(costs: Costs, waiting: int, page: int) -> int:
    """Return the most tokens in a forward for streams alone, while nothing else runs.

    A request that comes waits for the end of this forward, for half of it on average. So the size
    is the one with which all ``waiting`` tokens and such a request take the least time in all:
    some 128 tokens where each takes as long as the one before, as on a CPU, and thousands where
    many wait and larger forwards take less time for each token. It is larger if the rest would not
    be worth another forward.
    """

    def seconds(size: int) -> float:
        return (max(1.0, waiting / size) + 0.5) * costs.prefill(size)

    size = min(CHUNKS, key=seconds)
    if size < waiting < size + least_tokens(costs, page):
        size = waiting
    return max(page, size - size % page)


@lru_cache(maxsize=256)
def efficient_tokens(costs: Costs) -> int:
    """Return the fewest tokens of which a forward of their own takes hardly longer for each.

    That is, hardly longer than the largest measured forward takes.
    """
    best = TOLERANCE * costs.per_token_at_best
    return next((size for size in CHUNKS if costs.prefill(size) <= best * size), CHUNKS[-1])


def least_tokens(costs: Costs, page: int) -> int:
    """Return the fewest tokens of streams that are worth a forward, or riding along with one.

    If fewer are left for the final request, its forward takes hardly longer than without them.
    """
    free = _tokens_as_fast_as(costs, _SMALLEST_LEAST)
    return max(page, _SMALLEST_LEAST, min(free, _LARGEST_LEAST))


@lru_cache(maxsize=1024)
def _tokens_as_fast_as(costs: Costs, tokens: int) -> int:
    """Return the most tokens of which a forward takes hardly longer than with so many."""
    return costs.tokens_within(TOLERANCE * costs.prefill(tokens))


def fill_tokens(costs: Costs, prefilling: int, page: int) -> int:
    """Return how many tokens of streams join a forward that prefills for clients.

    The forward takes hardly longer with them, if it is so small that its tokens do not fill it. On
    a CPU, where each token takes as long as the one before, so few could join that none do.
    """
    few = max(1, min(prefilling, _SMALLEST_LEAST))
    tokens = _tokens_as_fast_as(costs, few) - prefilling
    return tokens - tokens % page if tokens >= _LEAST_INCREMENT else 0


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
        rank: streams of a smaller one come first, whatever their sizes. With :data:`FILLS` they
            only fill what others leave.
    """

    prefilled: int
    new: int
    ended: bool = False
    output: float = 0.0
    rank: int = 0


def choose_increments(
    streams: Sequence[Growth], tokens: int, least: int, fewest: int, page: int
) -> list[tuple[int, int]]:
    """Choose which streams to prefill in a step, and how far.

    Among those of a rank, first come those of which the step can compute all, the smallest job
    first. The rest is computed one after the other, so that if there is not room for all, some are
    complete: the smallest job first, or without ``output`` the one that was opened first, whose
    request may come first. Increments are whole pages.

    Args:
        streams: in the order in which they were opened.
        tokens: the most tokens of all increments together.
        least: the fewest new tokens of all streams together that do not only fill the step, unless
            one of these has ended.
        fewest: the fewest tokens of an increment that does not complete its stream, or ``tokens``
            if that is less; see :func:`fewest_tokens`.
        page: number of tokens in a KV page.

    Return the chosen streams' positions and the number of tokens that have KV afterwards.
    """
    leading = [s for s in streams if s.rank < FILLS]
    if sum(s.new for s in leading) < least and not any(s.ended and s.new for s in leading):
        return []
    fewest = max(min(fewest, tokens - tokens % page), min(_LEAST_INCREMENT, least))
    chosen: list[tuple[int, int]] = []
    whole_step = tokens

    def order(position: int) -> tuple[int, bool, float, int]:
        stream = streams[position]
        lasts = stream.new > whole_step
        size = 0.0 if lasts and not stream.output else stream.new + stream.output
        return stream.rank, lasts, size, position

    may = (n for n, stream in enumerate(streams) if stream.ended or stream.new >= fewest)
    for position in sorted(may, key=order):
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
