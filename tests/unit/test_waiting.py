"""The queue before a prefill batch, and a step without one: beside a stand-in scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import Pin, let_go, v0_5_12, v0_5_18, v0_5_23
from flashmoa_sglang.scheduler import room, waiting
from flashmoa_sglang.scheduler.batches import admit, next_prefill_batch
from flashmoa_sglang.scheduler.pins import StreamPins
from flashmoa_sglang.scheduler.side import Side

RELEASES = [v0_5_12, v0_5_18, v0_5_23]


class Tree:
    """A radix tree in which each pin holds 1,000 tokens."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.token_to_kv_pool_allocator = self

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return 0

    def dec_lock_ref(self, _node: object, _unlock: object) -> None:
        self.free += 1000


class Grammars:
    """Those whose grammar is compiled by now."""

    def __init__(self) -> None:
        self.ready: list[Any] = []

    def has_waiting_grammars(self) -> bool:
        return bool(self.ready)

    def get_ready_grammar_requests(self) -> list[Any]:
        ready, self.ready = self.ready, []
        return ready


def request(tokens: int, output: int, written: int = 0, stream: str | None = None) -> Any:
    """A waiting request; with a ``stream``, an increment of it."""
    mark = RequestMark(stream).to_custom_params() if stream is not None else None
    sampling = SimpleNamespace(max_new_tokens=output, custom_params=mark, ignore_eos=False)
    return SimpleNamespace(
        rid="some",
        origin_input_ids=[1] * tokens,
        output_ids=[1] * written,
        sampling_params=sampling,
        flashmoa_uncached=tokens,
    )


class Engine:
    """As much of a scheduler as decides about the queue."""

    def __init__(self, free: int, ratio: float, running: list[Any], total: int = 60_000) -> None:
        self.tree_cache = Tree(free)
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.chunked_prefill_size = 8192
        self.page_size = 1
        self.max_total_num_tokens = total
        self.max_running_requests = 64
        self.enable_hierarchical_cache = False
        self.enable_priority_preemption = False
        self.grammar_manager = Grammars()
        # Where either release keeps it.
        self.new_token_ratio = ratio
        self.new_token_ratio_tracker = SimpleNamespace(current=ratio)
        self.running = SimpleNamespace(
            reqs=running, batch_is_full=True, is_prefill_only=False, is_empty=lambda: not running
        )
        self.flashmoa: Any = SimpleNamespace(
            options=Options(),
            pins=StreamPins(self.tree_cache),
            costs=UNMEASURED,
            gathering=None,
            batch=None,
            work=0.0,
            pause=0,
            refused={},
            tell=lambda _: None,
        )

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)


@pytest.fixture(autouse=True)
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why, for each request that is."""
    reasons: list[str] = []

    def drop(engine: Any, which: set[int], why: str) -> None:
        reasons.extend([why] * len(which))
        queue = enumerate(engine.waiting_queue)
        engine.waiting_queue = [req for position, req in queue if position not in which]

    monkeypatch.setattr(waiting, "_drop", drop)
    return reasons


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoa_sglang.releases.look_after_host_cache", lambda _: None)
    monkeypatch.setattr(
        "flashmoa_sglang.releases.running_batch", lambda engine, _arguments: engine.running
    )


def chats(count: int, ratio: float) -> Engine:
    """What chats without a limit of their own leave of 60,000 tokens, having written little."""
    return Engine(60_000 - count * 600, ratio, [request(500, 100_000, 100) for _ in range(count)])


def test_chats_without_a_limit_leave_room_for_streams(dropped: list[str]) -> None:
    engine = chats(16, ratio=0.1)
    engine.waiting_queue = [request(2000, 0, stream="a")]
    waiting.prepare(engine, engine.running)
    assert not dropped


def test_they_leave_none_where_they_are_expected_to_become_long(dropped: list[str]) -> None:
    engine = chats(16, ratio=1.0)
    engine.waiting_queue = [request(2000, 0, stream="a")]
    waiting.prepare(engine, engine.running)
    assert dropped == ["no room in the KV pool"]


def test_pins_stay_while_nothing_is_short() -> None:
    engine = chats(16, ratio=0.1)
    engine.flashmoa.pins.replace("a", Pin(None, None))
    engine.waiting_queue = [request(2000, 1000)]
    waiting.prepare(engine, engine.running)
    assert len(engine.flashmoa.pins) == 1


class Adder:
    """As SGLang's ``PrefillAdder``: each request takes its tokens of what is free."""

    def __init__(self, tree: Tree, side: Any) -> None:
        self.tree_cache = tree
        self.tree_cache.flashmoa = side  # type: ignore[attr-defined]
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
    """1,000 tokens are free, and eight streams hold 1,000 each."""
    monkeypatch.setattr("flashmoa_sglang.releases.is_without_room", lambda said: said == "no token")
    monkeypatch.setattr("flashmoa_sglang.releases.cached_tokens", lambda _: 0)
    tree = Tree(1000)
    pins = StreamPins(tree)
    for stream in "abcdefgh":
        pins.replace(stream, Pin(None, None))
    return Adder(tree, SimpleNamespace(pins=pins, batch=None))


def test_requests_that_arrive_together_find_the_room_that_streams_hold(adder: Adder) -> None:
    waiting_requests = [request(150, 850) for _ in range(6)]
    for req in waiting_requests:
        assert admit(Adder.add, adder, req) == "continue"
    assert adder.can_run_list == waiting_requests
    # What the sixth left free was nobody's, and one stream more gave way for whoever comes next.
    assert len(adder.tree_cache.flashmoa.pins) == 2  # type: ignore[attr-defined]


def test_no_more_streams_give_way_than_requests_need(adder: Adder) -> None:
    assert admit(Adder.add, adder, request(500, 499)) == "continue"
    assert len(adder.tree_cache.flashmoa.pins) == 8  # type: ignore[attr-defined]


def test_sglang_is_asked_once_more_however_many_streams_give_way(adder: Adder) -> None:
    """It may count how often a request found no room."""
    assert admit(Adder.add, adder, request(4000, 4000)) == "continue"
    assert adder.asked == 2


def test_an_increment_without_room_makes_no_stream_give_way_and_leaves_the_queue(
    adder: Adder, dropped: list[str]
) -> None:
    increment = request(1500, 0, stream="z")
    assert admit(Adder.add, adder, increment) == "no token"
    side: Any = adder.tree_cache.flashmoa  # type: ignore[attr-defined]
    assert len(side.pins) == 8
    assert side.is_short_for_streams
    # Though there seems to be room: what it has cached is evictable, and counted.
    engine = Engine(50_000, 0.1, [])
    engine.waiting_queue = [increment]
    waiting.prepare(engine, engine.running)
    assert dropped == ["no room in the KV pool"]
    assert engine.flashmoa.refused == {"z": 1500}


def test_a_request_too_large_for_the_pool_waits(adder: Adder) -> None:
    assert admit(Adder.add, adder, request(9500, 0)) == "no token"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The streams of each message that there is room again."""
    streams: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        "flashmoa_sglang.releases.to_tokenizer", lambda _, news: streams.append(news.streams)
    )
    monkeypatch.setattr("flashmoa_sglang.releases.wrapped", lambda news: news)
    return streams


def test_streams_without_room_are_told_once_when_there_is_some(
    dropped: list[str], told: list[tuple[str, ...]]
) -> None:
    engine = Engine(500, 0.1, [], total=16_000)
    engine.waiting_queue = [request(400, 0, stream="a"), request(900, 0, stream="b")]
    waiting.prepare(engine, engine.running)
    # The sixteenth of the pool that they leave alone is more than what is free.
    assert len(dropped) == 2
    for free in (600, 1399, 1400, 1400, 2299, 2300, 9000):
        engine.tree_cache.free = free
        room.offer(engine, engine.running)
    assert told == [("a",), ("b",)]


def test_a_large_increment_without_room_keeps_no_smaller_one_waiting(
    dropped: list[str], told: list[tuple[str, ...]]
) -> None:
    engine = Engine(3000, 0.1, [], total=16_000)
    engine.waiting_queue = [request(5000, 0, stream="a"), request(50, 0, stream="b")]
    waiting.prepare(engine, engine.running)
    assert len(dropped) == 1
    engine.flashmoa.refused["b"] = 50
    room.offer(engine, engine.running)
    assert told == [("b",)]


def test_room_that_a_queued_increment_takes_is_offered_to_nobody(
    dropped: list[str], told: list[tuple[str, ...]]
) -> None:
    """Or the other stream would ask, be refused, be told, and so on."""
    engine = Engine(3000, 0.1, [], total=16_000)
    engine.waiting_queue = [request(1500, 0, stream="a"), request(1000, 0, stream="b")]
    waiting.prepare(engine, engine.running)
    assert len(dropped) == 1
    for _ in range(3):
        room.offer(engine, engine.running)
    assert told == []


def test_an_increment_of_a_stream_that_is_over_is_not_waited_for(dropped: list[str]) -> None:
    engine = Engine(100, 0.1, [])
    engine.flashmoa.pins.release("a")
    engine.waiting_queue = [request(5000, 0, stream="a")]
    waiting.prepare(engine, engine.running)
    assert len(dropped) == 1
    assert engine.flashmoa.refused == {}


def test_requests_stand_before_increments(dropped: list[str]) -> None:
    engine = Engine(50_000, 0.1, [])
    increment, first, second = request(9, 0, stream="a"), request(8, 5), request(7, 5)
    # Nobody is held back for ever.
    increment.flashmoa_held = 99
    engine.waiting_queue = [increment, first, second]
    waiting.prepare(engine, engine.running)
    assert engine.waiting_queue == [first, second, increment]


def test_streams_give_way_beforehand_where_requests_are_preempted() -> None:
    engine = Engine(500, 0.1, [])
    for stream in "abc":
        engine.flashmoa.pins.replace(stream, Pin(None, None))
    engine.waiting_queue = [request(1500, 0)]
    room.make(engine, engine.running)
    assert len(engine.flashmoa.pins) == 1


def test_a_stream_that_has_ended_is_told_nothing(told: list[tuple[str, ...]]) -> None:
    engine = Engine(9000, 0.1, [])
    side: Any = SimpleNamespace(refused={"a": 100}, pins=engine.flashmoa.pins)
    Side.end(side, "a")
    engine.flashmoa.refused = side.refused
    room.offer(engine, engine.running)
    assert told == []


def test_who_is_held_back_keeps_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(50_000, 0.1, [])
    everybody = [request(10 + n, 5) for n in range(5)]
    engine.waiting_queue = list(everybody)

    def prepare(scheduler: Any, _running: Any) -> list[Any]:
        scheduler.waiting_queue = everybody[:1] + everybody[2:4]
        return [everybody[1], everybody[4]]

    def build(scheduler: Any, **_: Any) -> Any:
        scheduler.waiting_queue = [scheduler.waiting_queue[2], newcomer]
        return None, scheduler.running

    newcomer = request(3, 3)
    monkeypatch.setattr("flashmoa_sglang.scheduler.batches.prepare", prepare)
    monkeypatch.setattr("flashmoa_sglang.releases.new_batch", lambda _: None)
    engine.flashmoa.shared_batch = lambda _: None
    next_prefill_batch(build, engine)
    assert engine.waiting_queue == [everybody[1], everybody[3], everybody[4], newcomer]


def test_what_is_left_of_a_prompt_in_chunks_is_nobody_elses(dropped: list[str]) -> None:
    engine = Engine(7000, 0.5, [])
    engine.chunked_req = request(9000, 0, stream="a")
    engine.chunked_req.fill_ids = [1] * 4000
    engine.chunked_req.extend_range = SimpleNamespace(end=4000)
    engine.chunked_req.extend_end = 4000
    engine.waiting_queue = [request(2500, 0, stream="b")]
    waiting.prepare(engine, engine.running)
    assert dropped


def test_a_grammar_is_looked_at_where_no_stream_may_go() -> None:
    """Memory is short, so that the stream waits for as long as others decode."""
    engine = Engine(500, 0.1, [request(500, 1000, 10)], total=1600)
    increment, structured = request(10, 0, stream="a"), request(20, 5)
    engine.waiting_queue = [increment]
    engine.grammar_manager.ready = [structured]
    assert next_prefill_batch(_never, engine) in (None, (None, engine.running))
    assert engine.waiting_queue == [increment, structured]


def test_so_it_is_where_prefills_wait_for_one_another() -> None:
    engine = Engine(50_000, 0.1, [request(500, 1000, 10)])
    first, structured = request(10, 5), request(20, 5)
    engine.waiting_queue, engine.grammar_manager.ready = [first], [structured]
    engine.flashmoa.gathering = SimpleNamespace(tokens=9000, holds=lambda *_: True)
    engine.flashmoa.queued = SimpleNamespace(count=lambda *_: 10)
    assert next_prefill_batch(_never, engine) in (None, (None, engine.running))
    assert engine.waiting_queue == [first, structured]


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a batch is built")


def test_who_leaves_the_queue_leaves_no_prefetch_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(
        "flashmoa_sglang.releases.release_prefetch", lambda _, req: given_back.append(req.rid)
    )
    engine = SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode="null"))
    let_go(engine, SimpleNamespace(rid="gone"))
    assert given_back == ["gone"]


@pytest.mark.parametrize("release", [v0_5_12, v0_5_18])
@pytest.mark.parametrize("storage", [True, False])
def test_storage_is_told_by_id(release: Any, storage: bool) -> None:
    told: list[str] = []
    tree = SimpleNamespace(release_aborted_request=told.append)
    engine = SimpleNamespace(enable_hicache_storage=storage, tree_cache=tree)
    release_prefetch = getattr(release, "release_prefetch", v0_5_18.release_prefetch)
    release_prefetch(engine, SimpleNamespace(rid="gone"))
    assert told == (["gone"] if storage else [])


def test_0_5_23_tells_it_itself() -> None:
    told: list[Any] = []
    req = SimpleNamespace(rid="gone")
    v0_5_23.release_prefetch(SimpleNamespace(_release_aborted_request=told.append), req)
    assert told == [req]


@pytest.mark.parametrize("release", RELEASES)
def test_the_share_kept_free_is_sglangs(release: Any) -> None:
    engine = Engine(0, 0.3, [])
    assert release.kept_free(engine, request(1, 1)) == 0.3
    fixed = request(1, 1)
    fixed.sampling_params.ignore_eos = True
    assert release.kept_free(engine, fixed) == (1.0 if release is v0_5_23 else 0.3)


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
def test_whether_prefixes_are_shared_is_said(given: dict[str, Any], shares: bool | None) -> None:
    scheduler: dict[str, Any] = {"disable_radix_cache": False, **given}
    options = Options(intra_turn=scheduler.pop("intra_turn", "auto"))
    side: Any = SimpleNamespace(options=options, publishes_early=True)
    assert Side.shares(side, SimpleNamespace(**scheduler)) is shares
