"""What streams take from the radix tree that other requests have computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flashmoa_sglang.messages import StreamProgress
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.scheduler.streams import SchedulerStreams

from tests.unit.plugin.fake_scheduler import FakeScheduler, make_increments, new_tokens

pytestmark = pytest.mark.usefixtures("fake_release")


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def streams(scheduler: FakeScheduler) -> SchedulerStreams:
    return scheduler.flashmoa.streams


def test_what_other_requests_have_computed_is_pinned_and_not_computed_again(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.tree_cache.cached = [[*range(80), 7]]
    scheduler.open_stream("a", 100)
    # With what is cached, 20 tokens are enough.
    assert len(make_increments(streams, tokens=20)["a"].origin_input_ids) == 100
    assert scheduler.tree_cache.locks == 1 and "a" in scheduler.flashmoa.pins
    streams.report()
    assert scheduler.sent[-1] == StreamProgress((("a", 80, 0, 0.0),))


def test_a_stream_that_takes_the_room_of_a_cached_one_is_matched_as_well(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.tree_cache.cached = [[*range(990)]]
    for stream in "abc":
        scheduler.open_stream(stream, 1000)
    made = make_increments(streams, tokens=100)
    assert [len(req.origin_input_ids) for req in made.values()] == [1000] * 3


def test_a_stream_that_has_hardly_grown_is_not_matched_again(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 100)
    streams.settle(make_increments(streams)["a"])
    scheduler.tree_cache.cached = [[*range(1000)]]
    streams.extend(new_tokens("a", range(100, 150)))
    streams.settle(make_increments(streams)["a"])
    assert scheduler.tree_cache.locks == 0
    streams.extend(new_tokens("a", range(150, 300)))
    assert not make_increments(streams)
    assert scheduler.tree_cache.locks == 1


@pytest.mark.parametrize("children", [{}, {100: "another request's"}])
def test_a_stream_is_matched_again_only_if_the_tree_goes_on_behind_its_pin(
    scheduler: FakeScheduler, streams: SchedulerStreams, children: dict[int, str]
) -> None:
    scheduler.open_stream("a", 100)
    streams.settle(make_increments(streams)["a"])
    scheduler.flashmoa.pins.replace("a", Pin(SimpleNamespace(children=children), None))
    scheduler.tree_cache.cached = [[*range(200)]]
    streams.extend(new_tokens("a", range(100, 300)))
    make_increments(streams)
    streams.report()
    assert (StreamProgress((("a", 200, 0, 0.0),)) in scheduler.sent) == bool(children)
