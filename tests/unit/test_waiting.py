"""The queue before a prefill batch, and a step without one: beside a stand-in scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import Pin, let_go, v0_5_12, v0_5_18, v0_5_23
from flashmoa_sglang.scheduler import waiting
from flashmoa_sglang.scheduler.batches import Side, next_prefill_batch
from flashmoa_sglang.scheduler.pins import StreamPins

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
            tell=lambda _: None,
        )

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)


@pytest.fixture(autouse=True)
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why, for each request that is."""
    reasons: list[str] = []
    monkeypatch.setattr(
        waiting, "_drop", lambda _engine, which, why: reasons.extend([why] * len(which))
    )
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


@pytest.mark.parametrize(("free", "pins"), [(1507, 0), (1508, 1)])
def test_a_request_never_waits_for_room_that_pins_hold(free: int, pins: int) -> None:
    """SGLang asks for more than 500 + 500 tokens and a page, beside half of what others may write;
    one of them is in the batch, too, in a mixed one."""
    engine = Engine(free, 0.5, [request(500, 1010, 0)])
    engine.flashmoa.pins.replace("a", Pin(None, None))
    engine.waiting_queue = [request(500, 500)]
    waiting.prepare(engine, engine.running)
    assert len(engine.flashmoa.pins) == pins
    assert engine.running.batch_is_full == bool(pins)


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
    side: Any = SimpleNamespace(options=Options(intra_turn=scheduler.pop("intra_turn", "auto")))
    assert Side.shares(side, SimpleNamespace(**scheduler)) is shares
