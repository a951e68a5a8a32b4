"""Test how many tokens of streams and of prompts ride along with a decode step."""

from __future__ import annotations

from math import inf

import pytest
from flashmoa_sglang.costs import FEWEST_RIDING, Costs
from flashmoa_sglang.scheduler.batches import possible_rides, prompt_tokens, stream_tokens
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.costs import any_costs

# A decode step takes 10 ms, and each further token 0.1 ms.
COSTS = Costs(((1, 0.0101), (1001, 0.1101)), decode_step=0.01)
# In a decode step of one request, the first 64 tokens take 0.05 ms each, and further ones 0.1 ms.
# Later, each would take 0.11 ms.
MIXED = Costs(
    COSTS.points, 0.01, ((1, 0, 0.01), (1, 16, 0.0102), (1, 64, 0.0132), (1, 256, 0.0324))
)
PAGES = st.sampled_from([1, 16, 64])
# More tokens than any ride here.
MANY = 1 << 20
BUDGETS = st.one_of(st.just(1.0), st.floats(0.5, 5))
# Up to 1024, for fewer than 512 decodes.
STEPS = (32, 64, 128, 256, 512, 544, 576, 640, 768, 1024)


def allowed_rides(costs: Costs, decoding: int, budget: float, page: int) -> set[int]:
    """Return the sizes of rides that make a step at most ``budget`` times as long."""
    step = costs.decode(decoding)
    rides = {(total - decoding) // page * page for total in STEPS if total >= decoding}
    return {
        ride
        for ride in rides
        if budget > 1
        and ride >= FEWEST_RIDING
        and costs.added(decoding, ride) <= (budget - 1) * step
    }


@given(
    costs=any_costs(),
    decoding=st.integers(1, 64),
    waiting=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    ends=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    budget=BUDGETS,
    page=PAGES,
)
def test_the_ride_is_the_one_of_all_sizes_that_saves_the_most(
    costs: Costs,
    decoding: int,
    waiting: list[int],
    ends: list[int],
    budget: float,
    page: int,
) -> None:
    tokens, forward = costs.points[-1]

    def seconds(ride: int) -> float:
        """Go through the steps one by one; the tokens of a stream are late after its end."""
        if not ride:
            return sum(waiting) * forward / tokens
        left, late = [*waiting], 0
        for done in range(max(ends)):
            room = ride
            for stream, wanted in enumerate(left):
                taken = min(wanted, room)
                left[stream], room = wanted - taken, room - taken
                if done + 1 == sorted(ends)[min(stream, len(ends) - 1)]:
                    late, left[stream] = late + left[stream], 0
        used = max(1.0, (sum(waiting) - late) / ride)
        return used * costs.added(decoding, ride) + late * forward / tokens

    rides = possible_rides(costs, decoding, budget, page, MANY)
    chosen = stream_tokens(rides, forward / tokens, waiting, ends)
    allowed = allowed_rides(costs, decoding, budget, page)
    assert chosen in allowed | {0}
    least = min(map(seconds, allowed | {0}))
    assert seconds(chosen) == pytest.approx(least, rel=1e-6, abs=1e-9)


@given(costs=any_costs(), decoding=st.integers(1, 64), budget=BUDGETS, page=PAGES)
def test_rides_are_in_order_and_within_the_budget(
    costs: Costs, decoding: int, budget: float, page: int
) -> None:
    rides = possible_rides(costs, decoding, budget, page, MANY)
    assert [ride for ride, _ in rides] == sorted(allowed_rides(costs, decoding, budget, page))
    assert all(added == costs.added(decoding, ride) for ride, added in rides)


def test_few_tokens_ride_in_each_of_many_steps_and_more_in_a_few() -> None:
    def ride(waiting: int, steps: int, budget: float, fewest: int = 0) -> int:
        rides = possible_rides(MIXED, 1, budget, 1, MANY)
        return stream_tokens(rides, MIXED.per_token_at_best, [waiting], [steps], fewest)

    assert ride(160, 100, 4) == 31
    assert ride(1600, 5, 4) > 63
    assert ride(1600, 5, 1.35) == 63
    assert ride(1600, 5, 1.0) == 0
    assert ride(160, 100, 4, fewest=32) == 63
    assert ride(160, 100, 1.35, fewest=128) == 63


def test_only_streams_whose_requests_come_soon_hurry() -> None:
    def ride(waiting: list[int], ends: list[int]) -> int:
        return stream_tokens(possible_rides(MIXED, 2, 4, 1, MANY), 1.0, waiting, ends)

    assert ride([100, 1600], [100, 5]) == 30
    assert ride([1600, 100], [100, 5]) > 63
    # There may be more streams than requests that decode.
    assert ride([100, 100, 1600], [100, 5]) == 30


@given(decoding=st.integers(1, 2000), page=PAGES)
def test_what_rides_fills_the_blocks_that_kernels_compute(decoding: int, page: int) -> None:
    ride = possible_rides(COSTS, decoding, 1e9, page, MANY)[-1][0]
    assert ride % page == 0 and ride >= FEWEST_RIDING
    # There is always room for the tokens of a whole block.
    assert 512 - page < (decoding + ride) % 512 or (decoding + ride) % 512 == 0


def test_nothing_rides_where_that_costs_more_than_a_forward_of_its_own() -> None:
    mixed = ((1, 0, 0.01), (1, 16, 0.02), (1, 256, 0.2))
    costs = Costs(COSTS.points, 0.01, mixed)
    rides = possible_rides(costs, 1, 100, 1, MANY)
    assert rides and stream_tokens(rides, costs.per_token_at_best, [1000], [100]) == 0
    assert prompt_tokens(rides, costs, 8, 1, 1000) == 0


@given(
    costs=any_costs(),
    decoding=st.integers(1, 64),
    prompts=st.integers(1, 10),
    tokens=st.integers(1, 5000),
    budget=BUDGETS,
    page=PAGES,
)
def test_prompts_ride_where_they_and_the_decodes_wait_less_in_all(
    costs: Costs, decoding: int, prompts: int, tokens: int, budget: float, page: int
) -> None:
    def waited(ride: int) -> float:
        """Go through the steps one by one, and sum up by how much each request waits longer."""
        left, seconds = tokens, 0.0
        while left > 0:
            longer = costs.added(decoding, ride)
            seconds += decoding * longer + prompts * (costs.decode(decoding) + longer)
            left -= ride
        return seconds

    rides = possible_rides(costs, decoding, budget, page, MANY)
    chosen = prompt_tokens(rides, costs, decoding, prompts, tokens)
    alone = (prompts + decoding) * costs.prefill(tokens)
    least = min(map(waited, allowed_rides(costs, decoding, budget, page)), default=inf)
    found = waited(chosen) if chosen else alone
    assert found == pytest.approx(min(least, alone), rel=1e-6, abs=1e-9)


def test_prompts_ride_next_to_many_decodes_and_not_if_many_prompts_wait() -> None:
    def ride(decoding: int, prompts: int, tokens: int) -> int:
        rides = possible_rides(MIXED, decoding, 4, 1, MANY)
        return prompt_tokens(rides, MIXED, decoding, prompts, tokens)

    # Next to one decode, 31 tokens need 0.5 ms more than its step, and later 3.4 ms.
    assert ride(decoding=1, prompts=1, tokens=31) == 31
    assert ride(decoding=8, prompts=1, tokens=2000) > 0
    assert ride(decoding=1, prompts=8, tokens=2000) == 0
