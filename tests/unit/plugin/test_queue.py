"""Test the queue before a prefill batch, and a step without a batch, with a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE, Release, Release0512, Release0523
from flashmoa_sglang.scheduler import admission, streams
from flashmoa_sglang.scheduler.admission import Job, shortest_first
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.state import SchedulerState
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.fake_scheduler import FakeScheduler, request

pytestmark = pytest.mark.usefixtures("fake_release")


def policy(scheduler: FakeScheduler, *, priorities: bool = False) -> Any:
    return SimpleNamespace(
        tree_cache=scheduler.tree_cache, enable_priority_scheduling=priorities, priority_sign=-1
    )


def test_requests_are_queued_before_increments() -> None:
    scheduler = FakeScheduler()
    increment, first, second = request(9, 0, stream="a"), request(8, 5), request(7, 5)
    waiting = [increment, first, second]
    admission.order_queue(None, policy(scheduler), waiting)
    assert waiting == [first, second, increment]


def test_the_shortest_job_goes_first_if_that_is_asked_for() -> None:
    scheduler = FakeScheduler()
    scheduler.flashmoa.options = Options(schedule="sjf")
    increment, long, short = request(9, 0, stream="a"), request(800, 500), request(7, 5)
    waiting = [increment, long, short]
    admission.order_queue(None, policy(scheduler), waiting)
    assert waiting == [short, long, increment]
    long.priority, short.priority = 5, 1
    admission.order_queue(None, policy(scheduler, priorities=True), waiting)
    assert waiting == [long, short, increment]


def test_a_compiled_grammar_is_noticed_while_prefills_wait_for_saturation() -> None:
    scheduler = FakeScheduler(running=[request(500, 1000, 10)])
    first, structured = request(10, 5), request(20, 5)
    scheduler.waiting_queue, scheduler.grammar_manager.ready = [first], [structured]
    state: Any = scheduler.flashmoa
    state.saturation_gate = SimpleNamespace(tokens=9000, holds=lambda *_: True)
    state.queued = SimpleNamespace(count=lambda *_: 10)
    assert next_prefill_batch(_never, scheduler) == (None, scheduler.running)
    assert scheduler.waiting_queue == [first, structured]


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a batch is built")


@pytest.mark.parametrize("release", [Release0512(), Release(), Release0523()])
def test_the_prefetch_of_a_request_that_is_dropped_is_released(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(RELEASE, "release_prefetch", release.release_prefetch)
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode="null"),
        enable_hicache_storage=True,
        tree_cache=SimpleNamespace(release_aborted_request=released.append),
        _release_aborted_request=lambda req: released.append(req.rid),
    )
    streams.let_go(scheduler, SimpleNamespace(rid="dropped"))
    assert released == ["dropped"]


@pytest.mark.parametrize("release", [Release0512(), Release(), Release0523()])
def test_room_is_kept_for_the_share_of_output_that_sglang_expects(release: Release) -> None:
    scheduler = FakeScheduler(ratio=0.3)
    assert release.reserved_output(scheduler, request(1, 1)) == 0.3
    fixed = request(1, 1)
    fixed.sampling_params.ignore_eos = True
    assert release.reserved_output(scheduler, fixed) == (
        1.0 if isinstance(release, Release0523) else 0.3
    )


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({}, True),
        ({"intra_turn": "off"}, False),
        ({"is_hybrid_swa": True}, False),
        ({"is_hybrid_ssm": True}, False),
        ({"disable_radix_cache": True}, None),
        ({"disable_radix_cache": True, "intra_turn": "off"}, None),
    ],
)
def test_sharing_is_off_if_kv_cannot_be_shared(given: dict[str, Any], shares: bool | None) -> None:
    scheduler: dict[str, Any] = {"disable_radix_cache": False, **given}
    options = Options(intra_turn=scheduler.pop("intra_turn", "auto"))
    state: Any = SimpleNamespace(options=options, late_kv="")
    assert SchedulerState.shares(state, SimpleNamespace(**scheduler)) is shares


def test_nothing_is_looked_for_in_storage_for_an_increment() -> None:
    """It would wait for the answer in the queue, which it leaves after one step."""
    asked: list[Any] = []
    final = request(900, 0, stream="a", final=True)
    for req in (request(900, 0, stream="a"), final, request(900, 5)):
        admission.prefetch(lambda _, req: asked.append(req), None, req)
    assert len(asked) == 2 and asked[0] is final


def test_an_increment_that_a_pairs_prefill_engine_cannot_start_leaves_its_queues() -> None:
    """SGLang keeps it there while it has no buffer for its metadata."""
    other = request(5, 5)
    bootstrap = SimpleNamespace(queue=[other], pop_bootstrapped=list)
    scheduler: Any = SimpleNamespace(
        waiting_queue=[],
        server_args=SimpleNamespace(disaggregation_mode="prefill"),
        disagg_prefill_bootstrap_queue=bootstrap,
    )
    message = SimpleNamespace(rid="increment")

    def make(_message: Any) -> None:
        req = request(900, 0, stream="a")
        req.rid = "increment"
        bootstrap.queue.append(req)

    released: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "let_go", lambda _, req: released.append(req.rid))
        assert streams.take_request(scheduler, message, make) is None
    assert bootstrap.queue == [other] and scheduler.waiting_queue == []
    assert released == ["increment"]


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
