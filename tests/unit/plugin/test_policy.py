"""Test which requests run first, and how much of a step streams may take."""

from __future__ import annotations

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.scheduler.policy import (
    HELD_STEPS,
    Job,
    WaitingRequest,
    choose_held_back,
    chunk_tokens,
    find_superseded,
    pause_steps,
    ride_tokens,
    shortest_first,
)
from hypothesis import given
from hypothesis import strategies as st

# A decode step takes 10 ms, and each further token 0.1 ms.
COSTS = Costs(((1, 0.0101), (1001, 0.1101)), decode_step=0.01)
ANY_COSTS = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(1e-4, 2.0)),
    min_size=2,
    max_size=6,
    unique_by=lambda point: point[0],
).map(lambda points: Costs(tuple(points), decode_step=min(seconds for _, seconds in points)))
QUEUES = st.lists(
    st.builds(
        WaitingRequest,
        stream=st.sampled_from([None, "a", "b"]),
        increment=st.booleans(),
        late=st.one_of(st.none(), st.integers(0, 5000)),
        length=st.integers(1, 5000),
        held=st.integers(0, 2 * HELD_STEPS),
    ),
    max_size=8,
)


@given(costs=ANY_COSTS, tokens=st.integers(1, 10000), seconds=st.floats(0, 5))
def test_costs_increase_with_tokens_and_can_be_inverted(
    costs: Costs, tokens: int, seconds: float
) -> None:
    assert costs.prefill(tokens + 1) >= costs.prefill(tokens) - 1e-9
    most = costs.tokens_within(seconds)
    if 0 < most < 1 << 20:
        assert costs.prefill(most) <= seconds + 1e-9
    if most < 1 << 19:
        assert costs.prefill(most + 1) > seconds - 1e-9


def test_costs_need_two_sizes() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        Costs(((5, 0.1), (5, 0.2)), 0.1)


@given(queue=QUEUES)
def test_only_increments_are_dropped_and_never_the_longest_of_a_stream(
    queue: list[WaitingRequest],
) -> None:
    dropped = find_superseded(queue)
    assert all(queue[position].increment for position in dropped)
    for stream in {request.stream for request in queue} - {None}:
        kept = [r for p, r in enumerate(queue) if r.stream == stream and p not in dropped]
        assert kept
        increments = [request.length for request in kept if request.increment]
        assert len(set(increments)) <= 1
        assert not increments or len(increments) == len(kept)


@given(queue=QUEUES)
def test_some_request_goes_and_none_is_held_back_for_long(queue: list[WaitingRequest]) -> None:
    held = choose_held_back(queue)
    assert len(held) < max(1, len(queue))
    assert all(queue[position].held < HELD_STEPS for position in held)
    if all(request.increment for request in queue):
        assert not held
    runs = [r for p, r in enumerate(queue) if p not in held and r.held < HELD_STEPS]
    if any(not request.increment for request in queue):
        assert not any(request.increment for request in runs)


def test_a_request_whose_stream_is_ready_does_not_wait_for_one_whose_is_not() -> None:
    ready, late = WaitingRequest(stream="a", late=10), WaitingRequest(stream="b", late=3000)
    assert choose_held_back([late, ready]) == {0}
    assert choose_held_back([late, WaitingRequest()]) == set()


JOBS = st.lists(
    st.builds(
        Job,
        uncached=st.integers(0, 5000),
        output=st.integers(0, 500),
        queued_at=st.floats(0, 1e5),
        priority=st.integers(-1, 1),
    ),
    max_size=10,
)


@given(jobs=JOBS)
def test_shortest_first_orders_by_priority_and_then_by_size(jobs: list[Job]) -> None:
    order = shortest_first(jobs, COSTS)
    assert sorted(order) == list(range(len(jobs)))
    ordered = [jobs[position] for position in order]
    assert [job.priority for job in ordered] == sorted(job.priority for job in jobs)


@given(uncached=st.integers(0, 5000), output=st.integers(0, 500), later=st.floats(1, 1e5))
def test_a_job_is_overtaken_for_no_longer_than_it_takes(
    uncached: int, output: int, later: float
) -> None:
    long = Job(uncached, output, queued_at=0.0)
    size = uncached + COSTS.decode_weight * output
    assert shortest_first([long, Job(0, 0, queued_at=size + later)], COSTS) == [0, 1]


def test_shorter_jobs_run_first_and_equal_ones_in_their_order() -> None:
    assert shortest_first([Job(2000, 100, 0.0), Job(100, 10, 5.0)], COSTS) == [1, 0]
    assert shortest_first([Job(10, 1, 0.0), Job(10, 1, 0.0)], COSTS) == [0, 1]


@given(
    costs=ANY_COSTS,
    decoding=st.integers(1, 64),
    share=st.floats(0.01, 1.0),
    page=st.sampled_from([1, 16, 64]),
)
def test_tokens_that_ride_along_stay_within_their_share(
    costs: Costs, decoding: int, share: float, page: int
) -> None:
    tokens = ride_tokens(costs, decoding, share, page)
    assert tokens == 0 or (tokens >= page and tokens % page == 0)
    if tokens and share < 1:
        longer = costs.prefill(decoding + tokens)
        assert longer - costs.decode(decoding) <= share * longer + 1e-9


def test_a_share_of_one_step_and_of_many() -> None:
    # With a step of 10 ms, 67 tokens are 40 % of 16.7 ms.
    assert ride_tokens(COSTS, 1, 0.4, 1) == pytest.approx(66, abs=1)
    # Fewer than 32 tokens are not worth a ride.
    assert ride_tokens(COSTS, 1, 0.2, 1) == 0
    # A forward of 1 s is 20 % of 5 s, in which there are also 400 steps of 10 ms.
    assert pause_steps(COSTS, 9900, 1, 0.2) == pytest.approx(400, abs=1)
    assert pause_steps(COSTS, 100, 1, 0.2) == 256
    assert pause_steps(COSTS, 100, 1, 1.0) == 0


def test_chunks_follow_the_cost_and_are_whole_pages() -> None:
    assert chunk_tokens(COSTS, 1) == pytest.approx(3400, rel=0.01)
    assert chunk_tokens(COSTS, 64) % 64 == 0
    slow = Costs(((1, 0.1), (1000, 10.0)), 0.1)
    assert chunk_tokens(slow, 1) == 128
