"""Streams whose requests come later: what the engine has of them is pinned, however busy it is."""

from __future__ import annotations

from typing import Any

import pytest
from flashmoa_sglang.messages import StreamProgress
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.streams import SchedulerStreams

from tests.unit.plugin.fake_scheduler import FakeScheduler, new_tokens, opening, request

pytestmark = pytest.mark.usefixtures("fake_release")


@pytest.fixture
def scheduler() -> FakeScheduler:
    """A scheduler that decodes, and has 300 tokens in its cache."""
    busy = FakeScheduler(running=[request(50, 100, 1)])
    busy.tree_cache.cached.append([*range(300)])
    return busy


@pytest.fixture
def streams(scheduler: FakeScheduler) -> SchedulerStreams:
    return scheduler.flashmoa.streams


def step(scheduler: FakeScheduler) -> None:
    """Run a step in which nothing joins the batch."""

    def build(scheduler: FakeScheduler) -> Any:
        return None, scheduler.running

    next_prefill_batch(build, scheduler)


def test_what_is_cached_of_a_new_stream_is_pinned_while_others_decode(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 400, grows=False)
    for _ in range(2):  # It is looked for, and reported, only once.
        step(scheduler)
        (told,) = [one for one in scheduler.sent if isinstance(one, StreamProgress)]
        assert told.increments == (("a", 300, 0, 0.0),)
        assert "a" in scheduler.flashmoa.pins and scheduler.tree_cache.locks == 1
        assert sum(streams.waiting_tokens()) == 100


def test_a_stream_is_looked_for_once_it_has_tokens(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    streams.open("a", opening("a"), scheduler.make_request)
    scheduler.open_stream("b", 100, grows=False)
    step(scheduler)
    assert "a" not in scheduler.flashmoa.pins and "b" in scheduler.flashmoa.pins
    streams.extend(new_tokens("a", range(200), grows=False))
    step(scheduler)
    assert "a" in scheduler.flashmoa.pins


def test_a_stream_that_ended_before_a_step_is_not_pinned(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    for stream in "ab":
        scheduler.open_stream(stream, 400, grows=False)
    streams.end("a")
    streams.claim("b")
    scheduler.open_stream("c", 400, grows=False)
    step(scheduler)
    assert [stream for stream in "abc" if stream in scheduler.flashmoa.pins] == ["c"]


def test_a_stream_without_room_is_pinned_once_there_is_some(scheduler: FakeScheduler) -> None:
    room, scheduler.tree_cache.free = scheduler.tree_cache.free, 0
    scheduler.open_stream("a", 400, grows=False)
    for _ in range(2):
        step(scheduler)
        assert not scheduler.flashmoa.pins and scheduler.tree_cache.locks == 0
    scheduler.tree_cache.free = room
    step(scheduler)
    assert "a" in scheduler.flashmoa.pins and scheduler.tree_cache.locks == 1


def test_a_stream_that_gave_way_is_prefilled_again_when_the_engine_is_idle(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 400, grows=False)
    step(scheduler)
    scheduler.flashmoa.pins.give_way()
    step(scheduler)
    assert not scheduler.flashmoa.pins and sum(streams.waiting_tokens()) == 400
