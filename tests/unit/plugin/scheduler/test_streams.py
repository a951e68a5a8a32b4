"""``SchedulerStreams``: the increments that a scheduler makes of prompt streams."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.messages import StreamProgress, StreamTokens
from flashmoa_sglang.scheduler import streams as module
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin

from tests.unit.plugin.scheduler.fakes import (
    FakeScheduler,
    make_increments,
    new_tokens,
    opening,
    request,
)

pytestmark = pytest.mark.usefixtures("fake_release", "any_increment")


def tell(scheduler: FakeScheduler, stream: str, tokens: range, kept: int | None = None) -> None:
    """Append tokens to a stream, which keeps its first ``kept`` tokens."""
    message = new_tokens(stream, tokens)
    back = () if kept is None else ((stream, kept),)
    scheduler.streams.extend(StreamTokens(message.tokens, kept=back))


def reported(scheduler: FakeScheduler) -> list[Any]:
    """Return the increments of all reports so far."""
    return [one.increments for one in scheduler.sent if isinstance(one, StreamProgress)]


def reports(scheduler: FakeScheduler) -> list[Any]:
    """Report, and return the increments of all reports so far."""
    scheduler.streams.report()
    return reported(scheduler)


def test_a_refused_stream_gets_no_increments(scheduler: FakeScheduler) -> None:
    scheduler.refused.add("a")
    scheduler.waiting_queue = [other] = [request(10, 5)]
    scheduler.open_stream("a", 100)
    # SGLang has told the HTTP process itself.
    assert scheduler.sent == [] and scheduler.waiting_queue == [other]
    assert not scheduler.streams.can_prefill_more() and not make_increments(scheduler)


def test_increments_do_not_wait_in_the_queue(scheduler: FakeScheduler) -> None:
    waiting = [request(10, 5), request(20, 5)]
    scheduler.waiting_queue = [*waiting]
    # SGLang refuses requests that would wait behind them.
    scheduler.max_queued = 2
    for stream in "ab":
        scheduler.open_stream(stream, 30)
    assert list(make_increments(scheduler)) == ["a", "b"] and scheduler.waiting_queue == waiting


def test_a_refused_increment_leaves_others(scheduler: FakeScheduler) -> None:
    for stream in "ab":
        scheduler.open_stream(stream, 30)
    scheduler.refused.add("a")
    assert list(make_increments(scheduler)) == ["b"]


def test_taken_back_tokens_do_not_count(scheduler: FakeScheduler) -> None:
    scheduler.open_stream("a", 100)
    first = make_increments(scheduler)["a"]
    scheduler.streams.settle(first)
    tell(scheduler, "a", range(200, 230), kept=60)
    scheduler.streams.finish(first, 0.5)
    assert reports(scheduler) == [(("a", 60, 60, 0.5, 0.0),)]
    second = make_increments(scheduler)["a"]
    assert second.origin_input_ids == [*range(60), *range(200, 230)]
    # Tokens are taken back while their increment runs. Its other tokens count.
    tell(scheduler, "a", range(300, 310), kept=70)
    assert make_increments(scheduler) == {}
    scheduler.streams.finish(second, 0.5)
    assert reports(scheduler)[1:] == [(("a", 70, 70, 0.5, 0.0),)]
    third = make_increments(scheduler)["a"]
    assert third.origin_input_ids == [*range(60), *range(200, 210), *range(300, 310)]


def test_an_ended_stream_is_forgotten(scheduler: FakeScheduler) -> None:
    scheduler.tree_cache.cached = [[*range(80)]]
    scheduler.open_stream("a", 100)
    increment = make_increments(scheduler)["a"]
    assert scheduler.tree_cache.locks == 1
    scheduler.streams.end("a")
    assert len(scheduler.streams) == 0 and scheduler.tree_cache.locks == 0
    # Later messages do not open it again.
    scheduler.streams.settle(increment)
    scheduler.streams.extend(new_tokens("a", range(100, 150), ended=True))
    scheduler.streams.open("a", opening("a"), scheduler.make_request)
    assert not scheduler.streams and not scheduler.streams.can_prefill_more()
    assert scheduler.waiting_queue == []
    assert [one.rid for one in scheduler.sent] == ["open-a", "open-a"]


def test_streams_that_were_never_prefilled_leave_nothing(busy: FakeScheduler) -> None:
    for tokens in (0, 100):
        busy.open_stream("a", tokens)
        busy.streams.end("a")
        assert not busy.streams._new


def test_a_refused_final_request_frees_its_stream(scheduler: FakeScheduler) -> None:
    scheduler.open_stream("a", 100)
    scheduler.streams.claim("a")
    tell(scheduler, "a", range(100, 150))
    assert not scheduler.streams.can_prefill_more()
    scheduler.streams.extend(StreamTokens((), unclaimed=("a", "ended")))
    assert make_increments(scheduler)["a"].origin_input_ids == [*range(150)]
    # Every rank gets all tokens, but only one rank the request that opens the stream.
    tell(scheduler, "b", range(100))
    assert len(scheduler.streams) == 1


def test_lost_kv_is_reported_once(scheduler: FakeScheduler) -> None:
    scheduler.open_stream("a", 100)
    scheduler.streams.finish(make_increments(scheduler)["a"], 0.5)
    for _ in range(3):
        found = reports(scheduler)
        scheduler.streams.lose("a")
    assert found == [(("a", 100, 100, 0.5, 0.0),), (("a", 0, 0, 0.0, 0.0),)]


def test_missing_room_is_reported_once(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fewest_tokens", lambda *_: 8)
    for stream in "ab":
        scheduler.open_stream(stream, 100)
    scheduler.sent.clear()
    for room in (-50, 0, 3):
        assert not make_increments(scheduler, room=room)
        scheduler.streams.report()
    assert scheduler.sent == [StreamProgress((), (("a", True), ("b", True)))]
    assert len(make_increments(scheduler, room=50)) == 1
    scheduler.streams.report()
    assert scheduler.sent[1:] == [StreamProgress((), (("a", False), ("b", False)))]


def test_each_increment_is_reported_once(scheduler: FakeScheduler) -> None:
    scheduler.open_stream("a", 100)
    assert reports(scheduler) == []
    increment = make_increments(scheduler)["a"]
    increment.cached_tokens = 30
    scheduler.streams.settle(increment)
    assert reports(scheduler) == []
    scheduler.streams.finish(increment, 0.5)
    for _ in range(2):
        assert reports(scheduler) == [(("a", 100, 70, 0.5, 0.0),)]


# Tokens in the radix tree that other requests have computed.


def test_cached_tokens_are_pinned(scheduler: FakeScheduler) -> None:
    scheduler.tree_cache.cached = [[*range(80), 7]]
    scheduler.open_stream("a", 100)
    # 80 tokens are cached, so that 20 new tokens are enough.
    assert len(make_increments(scheduler, tokens=20)["a"].origin_input_ids) == 100
    assert scheduler.tree_cache.locks == 1 and "a" in scheduler.flashmoa.pins
    assert reports(scheduler)[-1] == (("a", 80, 0, 0.0, 0.0),)


def test_replacing_streams_are_matched(scheduler: FakeScheduler) -> None:
    scheduler.tree_cache.cached = [[*range(990)]]
    for stream in "abc":
        scheduler.open_stream(stream, 1000)
    made = make_increments(scheduler, tokens=100)
    assert [len(req.origin_input_ids) for req in made.values()] == [1000] * 3


def test_small_growth_is_not_matched(scheduler: FakeScheduler) -> None:
    scheduler.open_stream("a", 100)
    scheduler.streams.settle(make_increments(scheduler)["a"])
    scheduler.tree_cache.cached = [[*range(1000)]]
    tell(scheduler, "a", range(100, 150))
    scheduler.streams.settle(make_increments(scheduler)["a"])
    assert scheduler.tree_cache.locks == 0
    tell(scheduler, "a", range(150, 300))
    assert not make_increments(scheduler)
    assert scheduler.tree_cache.locks == 1


@pytest.mark.parametrize("children", [{}, {100: "another request's"}])
def test_complete_pins_are_not_matched(scheduler: FakeScheduler, children: dict[int, str]) -> None:
    scheduler.open_stream("a", 100)
    scheduler.streams.settle(make_increments(scheduler)["a"])
    scheduler.flashmoa.pins.replace("a", Pin(SimpleNamespace(children=children), None))
    scheduler.tree_cache.cached = [[*range(200)]]
    tell(scheduler, "a", range(100, 300))
    make_increments(scheduler)
    assert ((("a", 200, 0, 0.0, 0.0),) in reports(scheduler)) == bool(children)


@pytest.fixture
def busy(scheduler: FakeScheduler) -> FakeScheduler:
    """The scheduler, which decodes, and has 300 tokens in its cache."""
    scheduler.running.reqs.append(request(50, 100, 1))
    scheduler.tree_cache.cached.append([*range(300)])
    return scheduler


def pinned(busy: FakeScheduler, streams: str = "abc") -> str:
    """Run a step that builds no batch. Return which streams are pinned."""
    next_prefill_batch(lambda scheduler: (None, scheduler.running), busy)
    return "".join(stream for stream in streams if stream in busy.flashmoa.pins)


def test_a_new_streams_cache_is_pinned_once(busy: FakeScheduler) -> None:
    """Also without room in the pool."""
    busy.tree_cache.free = 0
    busy.open_stream("a", 400, grows=False)
    for _ in range(2):
        assert pinned(busy) == "a" and busy.tree_cache.locks == 1
        assert reported(busy) == [(("a", 300, 0, 0.0, 0.0),)]
        assert busy.streams.leading_tokens(None)[0] == 100
    busy.flashmoa.pins.give_way()
    assert pinned(busy) == "" and busy.streams.leading_tokens(None)[0] == 400


def test_a_stream_is_matched_once_it_has_tokens(busy: FakeScheduler) -> None:
    busy.streams.open("a", opening("a"), busy.make_request)
    busy.open_stream("b", 100, grows=False)
    assert pinned(busy) == "b"
    busy.streams.extend(new_tokens("a", range(200), grows=False))
    assert pinned(busy) == "ab"


def test_a_stream_that_ended_is_not_pinned(busy: FakeScheduler) -> None:
    for stream in "abc":
        busy.open_stream(stream, 400, grows=False)
    busy.streams.end("a")
    busy.streams.claim("b")
    assert pinned(busy) == "c"
