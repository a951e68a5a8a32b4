"""``SchedulerStreams``: the increments that a scheduler makes of prompt streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.messages import StreamProgress, StreamTokens
from flashmoa_sglang.scheduler import streams as module
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.scheduler.streams import SchedulerStreams

from tests.unit.plugin.scheduler.fake_scheduler import (
    FakeScheduler,
    make_increments,
    new_tokens,
    opening,
    request,
)

pytestmark = pytest.mark.usefixtures("fake_release", "any_increment")


def test_a_stream_that_sglang_refuses_gets_no_increments(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.refused.add("a")
    other = request(10, 5)
    scheduler.waiting_queue = [other]
    scheduler.open_stream("a", 100)
    # SGLang has told the HTTP process itself.
    assert scheduler.sent == [] and scheduler.waiting_queue == [other]
    assert not streams.can_prefill_more() and not make_increments(streams)


def test_an_increment_that_sglang_refuses_leaves_the_others(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    for stream in "ab":
        scheduler.open_stream(stream, 30)
    scheduler.refused.add("a")
    assert list(make_increments(streams)) == ["b"]


def test_increments_do_not_wait_in_the_queue_of_clients(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    waiting = [request(10, 5), request(20, 5)]
    scheduler.waiting_queue = [*waiting]
    # SGLang refuses requests that would wait behind them.
    scheduler.max_queued = 2
    scheduler.open_stream("a", 100)
    assert list(make_increments(streams)) == ["a"] and scheduler.waiting_queue == waiting


def test_with_eagle_an_increment_has_the_token_after_its_last_page() -> None:
    """The radix tree has pairs of tokens, so that 64 tokens are three pages of 16 pairs."""
    scheduler = FakeScheduler(eagle=True)
    streams, scheduler.page_size = scheduler.flashmoa.streams, 16
    scheduler.open_stream("a", 64)
    assert streams.leading_tokens(None)[0] == 48
    # All of it must fit the forward.
    assert not make_increments(streams, tokens=16)
    increment = make_increments(streams, tokens=48, most=1)["a"]
    assert len(increment.origin_input_ids) == 33
    streams.settle(increment)
    assert streams.leading_tokens(None)[0] == 16
    streams.extend(new_tokens("a", [64]))
    assert len(make_increments(streams)["a"].origin_input_ids) == 65


def test_tokens_that_are_taken_back_are_not_counted_and_others_are_computed_instead(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 100)
    first = make_increments(streams)["a"]
    streams.settle(first)
    message = new_tokens("a", range(200, 230))
    streams.extend(StreamTokens(message.tokens, kept=(("a", 60),)))
    streams.finish(first, 0.5)
    streams.report()
    (report,) = [one for one in scheduler.sent if isinstance(one, StreamProgress)]
    assert report.increments == (("a", 60, 60, 0.5),)
    second = make_increments(streams)["a"]
    assert second.origin_input_ids == [*range(60), *range(200, 230)]
    # Of one that is still running when tokens are taken back, the others count.
    message = new_tokens("a", range(300, 310))
    streams.extend(StreamTokens(message.tokens, kept=(("a", 70),)))
    assert make_increments(streams) == {}
    streams.finish(second, 0.5)
    streams.report()
    assert scheduler.sent[-1].increments == (("a", 70, 70, 0.5),)
    third = make_increments(streams)["a"]
    assert third.origin_input_ids == [*range(60), *range(200, 210), *range(300, 310)]


def test_a_stream_that_has_ended_is_forgotten_with_its_pin(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.tree_cache.cached = [[*range(80)]]
    scheduler.open_stream("a", 100)
    increment = make_increments(streams)["a"]
    assert scheduler.tree_cache.locks == 1
    streams.end("a")
    assert len(streams) == 0 and scheduler.tree_cache.locks == 0
    # What comes later does not open it again.
    streams.settle(increment)
    streams.extend(new_tokens("a", range(100, 150), ended=True))
    streams.open("a", opening("a"), scheduler.make_request)
    assert len(streams) == 0 and not streams.can_prefill_more() and scheduler.waiting_queue == []
    assert [one.rid for one in scheduler.sent] == ["open-a", "open-a"]


def test_a_stream_goes_on_when_its_request_is_refused(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 100)
    streams.claim("a")
    streams.extend(new_tokens("a", range(100, 150)))
    assert not streams.can_prefill_more()
    streams.extend(StreamTokens((), unclaimed=("a", "ended")))
    assert make_increments(streams)["a"].origin_input_ids == [*range(150)]


def test_streams_of_other_ranks_take_no_room_of_this_one(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    """Every rank gets all tokens, but only one of them the request that opens the stream."""
    scheduler.open_stream("a", 100)
    streams.extend(new_tokens("b", range(100)))
    assert len(streams) == 1


def test_lost_kv_is_reported_once(scheduler: FakeScheduler, streams: SchedulerStreams) -> None:
    scheduler.open_stream("a", 100)
    streams.finish(make_increments(streams)["a"], 0.5)
    streams.report()
    for _ in range(2):
        streams.lose("a")
        streams.report()
    reports = [one.increments for one in scheduler.sent if isinstance(one, StreamProgress)]
    assert reports == [(("a", 100, 100, 0.5),), (("a", 0, 0, 0.0),)]


def test_streams_without_room_are_named_once_and_again_when_there_is_some(
    scheduler: FakeScheduler, streams: SchedulerStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fewest_tokens", lambda *_: 8)
    for stream in "ab":
        scheduler.open_stream(stream, 100)
    scheduler.sent.clear()
    for room in (-50, 0, 3):
        assert not make_increments(streams, room=room)
        streams.report()
    assert scheduler.sent == [StreamProgress((), (("a", True), ("b", True)))]
    assert len(make_increments(streams, room=50)) == 1
    streams.report()
    assert scheduler.sent[1:] == [StreamProgress((), (("a", False), ("b", False)))]


def test_each_increment_is_reported_once(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 100)
    scheduler.sent.clear()
    streams.report()
    assert scheduler.sent == []
    increment = make_increments(streams)["a"]
    increment.cached_tokens = 30
    streams.settle(increment)
    streams.report()
    assert scheduler.sent == []
    streams.finish(increment, 0.5)
    for _ in range(2):
        streams.report()
    assert scheduler.sent == [StreamProgress((("a", 100, 70, 0.5),))]


# What is taken from the radix tree that other requests have computed.


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


@pytest.fixture
def busy(scheduler: FakeScheduler) -> FakeScheduler:
    """The scheduler, which decodes, and has 300 tokens in its cache."""
    scheduler.running.reqs.append(request(50, 100, 1))
    scheduler.tree_cache.cached.append([*range(300)])
    return scheduler


def build_nothing(scheduler: FakeScheduler) -> None:
    """Run a step in which nothing joins the batch."""

    def build(scheduler: FakeScheduler) -> Any:
        return None, scheduler.running

    next_prefill_batch(build, scheduler)


@pytest.mark.usefixtures("busy")
def test_what_is_cached_of_a_new_stream_is_pinned_while_others_decode(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 400, grows=False)
    for _ in range(2):  # It is looked for, and reported, only once.
        build_nothing(scheduler)
        (told,) = [one for one in scheduler.sent if isinstance(one, StreamProgress)]
        assert told.increments == (("a", 300, 0, 0.0),)
        assert "a" in scheduler.flashmoa.pins and scheduler.tree_cache.locks == 1
        assert streams.leading_tokens(None)[0] == 100


@pytest.mark.usefixtures("busy")
def test_a_stream_is_looked_for_once_it_has_tokens(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    streams.open("a", opening("a"), scheduler.make_request)
    scheduler.open_stream("b", 100, grows=False)
    build_nothing(scheduler)
    assert "a" not in scheduler.flashmoa.pins and "b" in scheduler.flashmoa.pins
    streams.extend(new_tokens("a", range(200), grows=False))
    build_nothing(scheduler)
    assert "a" in scheduler.flashmoa.pins


@pytest.mark.usefixtures("busy")
def test_a_stream_that_ended_before_a_step_is_not_pinned(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    for stream in "ab":
        scheduler.open_stream(stream, 400, grows=False)
    streams.end("a")
    streams.claim("b")
    scheduler.open_stream("c", 400, grows=False)
    build_nothing(scheduler)
    assert [stream for stream in "abc" if stream in scheduler.flashmoa.pins] == ["c"]


@pytest.mark.usefixtures("busy")
def test_all_that_is_cached_of_a_stream_is_pinned_however_little_room_there_is(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.tree_cache.free = 0
    scheduler.open_stream("a", 400, grows=False)
    build_nothing(scheduler)
    assert "a" in scheduler.flashmoa.pins and streams.leading_tokens(None)[0] == 100


@pytest.mark.usefixtures("busy")
def test_a_stream_that_gave_way_is_prefilled_again_when_the_engine_is_idle(
    scheduler: FakeScheduler, streams: SchedulerStreams
) -> None:
    scheduler.open_stream("a", 400, grows=False)
    build_nothing(scheduler)
    scheduler.flashmoa.pins.give_way()
    build_nothing(scheduler)
    assert not scheduler.flashmoa.pins and streams.leading_tokens(None)[0] == 400
