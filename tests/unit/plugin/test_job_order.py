"""Test in which order waiting requests run if the shortest jobs run first."""

from __future__ import annotations

from flashmoa_sglang.costs import Costs
from flashmoa_sglang.scheduler.queue import Job, shortest_first
from hypothesis import given
from hypothesis import strategies as st

COSTS = Costs(((1, 0.0101), (1001, 0.1101)), decode_step=0.01)

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
