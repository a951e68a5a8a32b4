"""Room in the KV pool: requests come before streams, which are notified when there is room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler import admission, queue
from flashmoa_sglang.scheduler.pins import Pin, StreamPins
from flashmoa_sglang.scheduler.state import SchedulerState

from tests.unit.plugin.fake_scheduler import FakeScheduler, Tree, request

pytestmark = pytest.mark.usefixtures("dropped")


class Adder:
    """Stands for SGLang's ``PrefillAdder``: each request takes its tokens from those free."""

    def __init__(self, tree: Tree, state: Any) -> None:
        self.tree_cache = tree
        self.tree_cache.flashmoa = state  # type: ignore[attr-defined]
        self.can_run_list: list[Any] = []
        self.taken = 0
        self.asked = 0

    page_size = 1

    @property
    def rem_total_tokens(self) -> int:
        return self.left

    @property
    def left(self) -> int:
        return self.tree_cache.available_size() - self.taken

    def budget_state(self) -> str:
        return "continue" if self.left > 0 else "no token"

    def add(self, req: Any) -> str:
        self.asked += 1
        tokens = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        if tokens > self.left:
            return "no token"
        self.taken += tokens
        self.can_run_list.append(req)
        return self.budget_state()


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Adder:
    """An adder for a pool in which 1,000 tokens are free and eight streams hold 1,000 each."""
    monkeypatch.setattr(admission, "lacks_room", lambda result: result == "no token")
    monkeypatch.setattr(RELEASE, "cached_tokens", lambda _: 0)
    tree = Tree(1000)
    pins = StreamPins(tree)
    for stream in "abcdefgh":
        pins.replace(stream, Pin(None, None))
    return Adder(tree, SimpleNamespace(pins=pins, shared=None))


def test_requests_that_arrive_together_get_the_room_that_streams_hold(adder: Adder) -> None:
    waiting_requests = [request(150, 850) for _ in range(6)]
    for req in waiting_requests:
        assert admission.admit(Adder.add, adder, req) == "continue"
    assert adder.can_run_list == waiting_requests
    # The sixth request left nothing free, so one more stream gave way for the request after it.
    assert len(adder.tree_cache.flashmoa.pins) == 2  # type: ignore[attr-defined]


def test_no_more_streams_give_way_than_requests_need(adder: Adder) -> None:
    assert admission.admit(Adder.add, adder, request(500, 499)) == "continue"
    assert len(adder.tree_cache.flashmoa.pins) == 8  # type: ignore[attr-defined]


def test_sglangs_adder_is_called_only_once_more_if_many_streams_give_way(adder: Adder) -> None:
    """SGLang may count how often a request found no room."""
    assert admission.admit(Adder.add, adder, request(4000, 4000)) == "continue"
    assert adder.asked == 2


def test_an_increment_without_room_is_dropped_and_makes_no_stream_give_way(
    adder: Adder, dropped: list[str]
) -> None:
    increment = request(1500, 0, stream="z")
    assert admission.admit(Adder.add, adder, increment) == "no token"
    state: Any = adder.tree_cache.flashmoa  # type: ignore[attr-defined]
    assert len(state.pins) == 8
    assert state.lack_concerns_streams
    # There only seems to be room, because the stream's own cached prefix counts as evictable.
    scheduler = FakeScheduler(50_000, 0.1, [])
    scheduler.waiting_queue = [increment]
    queue.prepare(scheduler, scheduler.running)
    assert dropped == ["no room in the KV pool"]
    assert scheduler.flashmoa.refused == {"z": 1500}


def test_a_request_too_large_for_the_pool_waits(adder: Adder) -> None:
    assert admission.admit(Adder.add, adder, request(9500, 0)) == "no token"


@pytest.fixture
def notified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The streams of each message that there is room."""
    streams: list[tuple[str, ...]] = []
    monkeypatch.setattr(RELEASE, "to_tokenizer", lambda _, message: streams.append(message.streams))
    return streams


def test_streams_without_room_are_notified_once_when_there_is_some(
    dropped: list[str], notified: list[tuple[str, ...]]
) -> None:
    scheduler = FakeScheduler(500, 0.1, [], total=16_000)
    scheduler.waiting_queue = [request(400, 0, stream="a"), request(900, 0, stream="b")]
    queue.prepare(scheduler, scheduler.running)
    # Increments leave a sixteenth of the pool free, which is more than what is free here.
    assert len(dropped) == 2
    for free in (600, 1399, 1400, 1400, 2299, 2300, 9000):
        scheduler.tree_cache.free = free
        admission.offer_room(scheduler, scheduler.running)
    assert notified == [("a",), ("b",)]


def test_a_large_increment_without_room_does_not_hold_up_a_smaller_one(
    dropped: list[str], notified: list[tuple[str, ...]]
) -> None:
    scheduler = FakeScheduler(3000, 0.1, [], total=16_000)
    scheduler.waiting_queue = [request(5000, 0, stream="a"), request(50, 0, stream="b")]
    queue.prepare(scheduler, scheduler.running)
    assert len(dropped) == 1
    scheduler.flashmoa.refused["b"] = 50
    admission.offer_room(scheduler, scheduler.running)
    assert notified == [("b",)]


def test_room_that_a_queued_increment_takes_is_not_offered(
    dropped: list[str], notified: list[tuple[str, ...]]
) -> None:
    """Otherwise the other stream would send an increment, be refused, be notified, and so on."""
    scheduler = FakeScheduler(3000, 0.1, [], total=16_000)
    scheduler.waiting_queue = [request(1500, 0, stream="a"), request(1000, 0, stream="b")]
    queue.prepare(scheduler, scheduler.running)
    assert len(dropped) == 1
    for _ in range(3):
        admission.offer_room(scheduler, scheduler.running)
    assert notified == []


def test_room_for_a_stream_that_has_ended_is_not_offered(dropped: list[str]) -> None:
    scheduler = FakeScheduler(100, 0.1, [])
    scheduler.flashmoa.pins.release("a")
    scheduler.waiting_queue = [request(5000, 0, stream="a")]
    queue.prepare(scheduler, scheduler.running)
    assert len(dropped) == 1
    assert scheduler.flashmoa.refused == {}


def test_streams_give_way_before_requests_are_preempted() -> None:
    scheduler = FakeScheduler(500, 0.1, [])
    for stream in "abc":
        scheduler.flashmoa.pins.replace(stream, Pin(None, None))
    scheduler.waiting_queue = [request(1500, 0)]
    admission.make_room(scheduler, scheduler.running)
    assert len(scheduler.flashmoa.pins) == 1


def test_a_stream_that_has_ended_is_not_notified(notified: list[tuple[str, ...]]) -> None:
    scheduler = FakeScheduler(9000, 0.1, [])
    state: Any = SimpleNamespace(refused={"a": 100}, pins=scheduler.flashmoa.pins)
    SchedulerState.end_stream(state, "a")
    scheduler.flashmoa.refused = state.refused
    admission.offer_room(scheduler, scheduler.running)
    assert notified == []
