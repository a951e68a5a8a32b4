"""What a scheduler does with messages, requests of streams and the table of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.messages import (
    CountUpdate,
    MeasuredCosts,
    RequestMark,
    StreamProgress,
)
from flashmoa_sglang.scheduler import state
from flashmoa_sglang.scheduler.pins import Pin

from tests.unit.plugin.fake_scheduler import FakeScheduler

pytestmark = pytest.mark.usefixtures("fake_release")


@pytest.fixture
def scheduler() -> FakeScheduler:
    """A scheduler to which the plugin's state has been attached as it is when SGLang starts."""
    made: Any = FakeScheduler()
    made._request_dispatcher = SimpleNamespace(_mapping={})
    state.attach(None, made)
    return made


def receive(scheduler: Any, message: Any) -> None:
    scheduler._request_dispatcher._mapping[type(message)](message)


def test_a_final_request_ends_the_increments_of_its_stream(scheduler: FakeScheduler) -> None:
    for stream in "ab":
        scheduler.open_stream(stream, 50)
    custom = RequestMark("a", final=True).to_custom_params()
    final = SimpleNamespace(rid="r", sampling_params=SimpleNamespace(custom_params=custom))
    handled: list[Any] = []
    state.handle_request(lambda _, message: handled.append(message), scheduler, final)
    assert handled == [final]
    assert sum(scheduler.flashmoa.streams.waiting_tokens()) == 50


def test_costs_include_steps_in_which_tokens_ride(scheduler: FakeScheduler) -> None:
    mixed = ((1, 0, 0.01), (1, 64, 0.02))
    receive(scheduler, MeasuredCosts(((1, 0.01), (1001, 0.11)), 0.01, mixed))
    assert scheduler.flashmoa.costs.added(1, 64) == pytest.approx(0.01)
    assert scheduler.flashmoa.saturation_gate is None


@pytest.mark.parametrize("together", [False, True])
def test_no_rank_of_those_that_step_together_waits_for_saturation(
    scheduler: FakeScheduler, together: bool
) -> None:
    scheduler.require_mlp_sync = together
    receive(scheduler, MeasuredCosts(((1, 0.01), (1001, 0.11)), 0.01, waits_for=500))
    gate = scheduler.flashmoa.saturation_gate
    assert (gate is None) == together
    assert gate is None or gate.tokens == 500


@pytest.mark.parametrize("flushed", [True, False])
def test_streams_are_prefilled_again_after_the_cache_is_flushed(
    scheduler: FakeScheduler, flushed: bool
) -> None:
    scheduler.open_stream("a", 50)
    for increment in scheduler.flashmoa.streams.make(100, 1, 100, 16):
        scheduler.flashmoa.pins.replace("a", Pin(None, None))
        scheduler.flashmoa.streams.settle(increment)
    assert state.flush_cache(lambda _: flushed, scheduler) is flushed
    assert len(scheduler.flashmoa.pins) == (0 if flushed else 1)
    assert scheduler.flashmoa.streams.can_prefill_more() == flushed
    # The tree was reset, with its locks.
    assert scheduler.tree_cache.free == 50_000


class ReqToTokenPool:
    def __init__(self, size: int, dtype: str) -> None:
        self.size, self.dtype = size, dtype


class HybridReqToTokenPool(ReqToTokenPool):
    """The table of a model with a state besides KV."""


@pytest.mark.parametrize(("table", "rows"), [(ReqToTokenPool, 64 + 16), (HybridReqToTokenPool, 64)])
def test_the_table_of_requests_has_rows_for_increments(
    table: type[ReqToTokenPool], rows: int
) -> None:
    pool = table.__new__(table)
    state.add_rows(ReqToTokenPool.__init__, pool, 64, dtype="int32")
    assert (pool.size, pool.dtype) == (rows, "int32")


def test_the_buffers_of_forwards_are_as_large_as_that_table() -> None:
    assert state.largest_batch(lambda *_: 64, "runner") == 64 + 16


def test_counts_are_reported_by_how_much_they_have_grown(scheduler: FakeScheduler) -> None:
    own = scheduler.flashmoa
    own.report_counts(scheduler)
    assert scheduler.sent == []
    own.duplicates_avoided = 30
    own.report_counts(scheduler)
    own.duplicates_avoided, own.pins.gave_way = 50, 2
    own.streams._progress.append(("a", 5, 5, 0.1))
    own.report_counts(scheduler)
    assert scheduler.sent == [
        CountUpdate(30, 0),
        StreamProgress((("a", 5, 5, 0.1),)),
        CountUpdate(20, 2),
    ]
