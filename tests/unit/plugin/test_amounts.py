"""How much of a step streams and prompts may take, and which streams."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from flashmoa_sglang.costs import FEWEST_RIDING, Costs
from flashmoa_sglang.scheduler.amounts import _LEAST_INCREMENT as SMALLEST
from flashmoa_sglang.scheduler.amounts import _SMALLEST_LEAST as LEAST
from flashmoa_sglang.scheduler.amounts import (
    FILLS,
    Growth,
    choose_increments,
    choose_prompt_ride,
    choose_stream_ride,
    fewest_tokens,
    fill_tokens,
    least_tokens,
    possible_rides,
    stream_chunk,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.test_costs import any_costs

# A decode step takes 10 ms, and each further token 0.1 ms.
COSTS = Costs(((1, 0.0101), (1001, 0.1101)), decode_step=0.01)
# Up to 64 tokens are as fast as one, and each further token takes 0.1 ms.
FLAT = Costs(((1, 0.01), (64, 0.01), (1064, 0.11)), decode_step=0.01)
PAGES = st.sampled_from([1, 16, 64])


@st.composite
def growing(draw: st.DrawFn) -> tuple[int, list[Growth]]:
    """Draw a page size and streams that have grown by whole pages."""
    page = draw(PAGES)
    stream = st.builds(
        Growth,
        prefilled=st.integers(0, 50).map(lambda pages: pages * page),
        new=st.integers(1, 40).map(lambda pages: pages * page),
        ended=st.booleans(),
        rank=st.integers(0, FILLS),
    )
    return page, draw(st.lists(stream, max_size=8))


@given(
    growing=growing(),
    tokens=st.integers(0, 600),
    least=st.integers(1, 200),
    open_streams=st.integers(0, 500),
)
def test_increments_are_whole_pages_of_due_streams_of_completed_ones_and_then_of_the_oldest(
    growing: tuple[int, list[Growth]], tokens: int, least: int, open_streams: int
) -> None:
    page, streams = growing
    fewest = fewest_tokens(open_streams, least)
    chosen = choose_increments(streams, tokens, least, fewest, page)
    sizes = {position: end - streams[position].prefilled for position, end in chosen}
    assert len(sizes) == len(chosen)
    assert all(size > 0 and size % page == 0 for size in sizes.values())
    assert all(size <= streams[position].new for position, size in sizes.items())
    left = tokens - sum(sizes.values())
    assert left >= 0

    def order(position: int) -> tuple[int, int, int]:
        new = streams[position].new
        return (streams[position].rank, new if new <= tokens else tokens + 1, position)

    # Only the last stream may not be completed.
    assert [*sizes] == sorted(sizes, key=order)
    assert all(sizes[position] == streams[position].new for position in [*sizes][:-1])
    leading = [stream for stream in streams if stream.rank != FILLS]
    if sum(stream.new for stream in leading) < least and not any(s.ended for s in leading):
        assert not chosen
        return

    fewest = min(least, max(SMALLEST, min(open_streams // 2, tokens - tokens % page)))

    def is_worth(stream: Growth, size: int) -> bool:
        return size > 0 and (size >= fewest or (stream.ended and size == stream.new))

    assert all(is_worth(streams[position], size) for position, size in sizes.items())
    # The tokens that are left are enough for no stream that was left out, and one that was left
    # out comes after the last that was not.
    for position, stream in enumerate(streams):
        if position not in sizes:
            most = min(stream.new, left)
            assert not is_worth(stream, most - most % page)
            assert not sizes or order(position) > order([*sizes][-1]) or not is_worth(stream, most)


def test_without_room_for_all_one_stream_is_completed_after_the_other() -> None:
    streams = [Growth(0, 500), Growth(900, 20), Growth(0, 400), Growth(0, 300)]
    assert choose_increments(streams, 120, 64, SMALLEST, 1) == [(1, 920), (0, 100)]
    # The smallest job comes first if they are told apart by their sizes.
    sized = [replace(stream, output=1.0) for stream in streams]
    assert choose_increments(sized, 120, 64, SMALLEST, 1) == [(1, 920), (3, 100)]


@given(costs=any_costs(), pages=st.integers(0, 10_000), page=PAGES)
def test_the_forwards_of_streams_and_a_request_that_waits_for_one_take_the_least_time(
    costs: Costs, pages: int, page: int
) -> None:
    waiting, sizes = pages * page, [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    # Of all forwards of one size, and half of one for which the request waits.
    seconds = {n: (max(1.0, waiting / n) + 0.5) * costs.prefill(n) for n in sizes}
    best = min(sizes, key=lambda n: seconds[n])
    # What would not be worth another forward joins this one.
    joins = best < waiting < best + least_tokens(costs, page)
    assert stream_chunk(costs, waiting, page) == (
        waiting if joins else max(page, best - best % page)
    )


def test_a_forward_for_streams_is_short_where_larger_ones_are_not_more_efficient() -> None:
    core = Costs(((1, 0.02), (1001, 3.02)), 0.05)  # As SmolLM2 on a CPU core: 3 ms for a token.
    assert stream_chunk(core, 1000, 1) == 128
    gpu = Costs(((1, 0.02), (128, 0.02), (8320, 1.02)), 0.02)
    assert stream_chunk(gpu, 1000, 1) == 256 and stream_chunk(gpu, 20_000, 1) == 1024
    assert stream_chunk(core, 80, 1) == 80  # The rest would not be worth another forward.
    assert stream_chunk(core, 1000, 1024) == 1024  # At least a page.


def nearly_free(costs: Costs, most: int, few: int = LEAST) -> int:
    """Return the most tokens, of at most ``most``, that take 1.1 times as long as a few."""
    longest = 1.1 * costs.prefill(few)
    allowed = [n for n in range(1, most + 1) if costs.prefill(n) <= longest]
    return max(allowed, default=0)


@given(costs=any_costs(), page=PAGES)
def test_tokens_that_a_final_request_computes_as_fast_are_left_to_it(
    costs: Costs, page: int
) -> None:
    assert least_tokens(costs, page) == max(page, LEAST, nearly_free(costs, 128))


@given(costs=any_costs(), prefilling=st.integers(0, 300), page=PAGES)
def test_streams_fill_a_forward_of_clients_while_that_is_nearly_free(
    costs: Costs, prefilling: int, page: int
) -> None:
    tokens = fill_tokens(costs, prefilling, page)
    assert tokens >= 0 and tokens % page == 0
    left = nearly_free(costs, 1000, min(max(prefilling, 1), LEAST)) - prefilling
    if left == 1000 - prefilling:
        assert tokens + page > left
    else:
        assert tokens == (left - left % page if left >= SMALLEST else 0)


def test_streams_join_no_small_request_where_each_token_takes_as_long_as_the_one_before() -> None:
    core = Costs(((1, 0.05), (16, 0.1), (933, 2.9)), 0.05)  # SmolLM2 on a CPU core.
    assert fill_tokens(core, 18, 1) == 0
    assert fill_tokens(FLAT, 18, 1) == 74 - 18


# In a decode step of one request, the first 64 tokens take 0.05 ms each, and further ones 0.1 ms.
# Later, each would take 0.11 ms.
MIXED = Costs(
    COSTS.points, 0.01, ((1, 0, 0.01), (1, 16, 0.0102), (1, 64, 0.0132), (1, 256, 0.0324))
)
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
    limits=st.tuples(BUDGETS, st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([0.1, 0.4, 1.0])),
    page=PAGES,
)
def test_the_ride_is_the_one_of_all_sizes_that_saves_the_most(
    costs: Costs,
    decoding: int,
    waiting: list[int],
    ends: list[int],
    limits: tuple[float, float, float],
    page: int,
) -> None:
    tokens, forward = costs.points[-1]
    budget, longer, share = limits
    short = longer * costs.decode(decoding)

    def seconds(ride: int) -> float:
        """Go through the steps one by one; the tokens of a stream are late after its end.

        Of a ride that may not be in each step, its share rides in each.
        """
        if not ride:
            return sum(waiting) * forward / tokens
        left, late = [*map(float, waiting)], 0.0
        added = costs.added(decoding, ride)
        for done in range(max(ends)):
            room = ride * share if added > short else float(ride)
            for stream, wanted in enumerate(left):
                taken = min(wanted, room)
                left[stream], room = wanted - taken, room - taken
                if done + 1 == sorted(ends)[min(stream, len(ends) - 1)]:
                    late, left[stream] = late + left[stream], 0
        used = max(1.0, (sum(waiting) - late) / ride)
        return used * added + late * forward / tokens

    rides = possible_rides(costs, decoding, budget, page, MANY)
    rate = forward / tokens
    chosen, added = choose_stream_ride(rides, rate, waiting, ends, short=(short, share))
    assert (chosen, added) in [*rides, (0, 0.0)]
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
        return choose_stream_ride(rides, MIXED.per_token_at_best, [waiting], [steps], fewest)[0]

    assert ride(160, 100, 4) == 31
    assert ride(1600, 5, 4) > 63
    assert ride(1600, 5, 1.35) == 63
    assert ride(1600, 5, 1.0) == 0
    assert ride(160, 100, 4, fewest=32) == 63
    assert ride(160, 100, 1.35, fewest=128) == 63


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
    chosen = choose_prompt_ride(rides, costs, decoding, prompts, tokens)
    alone = (prompts + decoding) * costs.prefill(tokens)
    least = min(map(waited, allowed_rides(costs, decoding, budget, page)), default=inf)
    found = waited(chosen) if chosen else alone
    assert found == pytest.approx(min(least, alone), rel=1e-6, abs=1e-9)
