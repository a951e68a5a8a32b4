"""Decides how many tokens ride along with a decode step, in one forward (SGLang's mixed chunk).

A decode step reads all weights for a few tokens, and has time left for more. What rides costs the
engine less than in a forward of its own, and no decode has to wait for such a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from flashmoa_sglang.costs import FEWEST_RIDING, STEP_SIZES

if TYPE_CHECKING:
    from flashmoa_sglang.costs import Costs

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


def stream_tokens(
    rides: Sequence[Ride],
    rate: float,
    waiting: Sequence[int],
    ends: Sequence[int],
    fewest: int = 0,
) -> int:
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
    """
    total, ends = sum(waiting), sorted(ends)

    def seconds(ride: int, added: float) -> float:
        late = _late_tokens(waiting, ends, ride) if total > ride * ends[0] else 0
        return max(1.0, (total - late) / ride) * added + late * rate

    best, added = min(rides, key=lambda ride: seconds(*ride), default=(0, 0.0))
    if not best or seconds(best, added) >= total * rate:
        return 0
    return max(best, next((ride for ride, _ in rides if ride >= fewest), rides[-1][0]))


def _late_tokens(waiting: Sequence[int], ends: Sequence[int], ride: int) -> int:
    """Return how many tokens of streams have not ridden when the requests come that need them.

    Args: ends: the steps after which requests come, ascending.
    """
    queued = late = 0
    for position, tokens in enumerate(waiting):
        queued += tokens
        left = min(tokens, max(0, queued - ride * ends[min(position, len(ends) - 1)]))
        queued, late = queued - left, late + left
    return late


def prompt_tokens(
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
