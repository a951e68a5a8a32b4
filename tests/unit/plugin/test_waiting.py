"""The queue before a prefill batch, and a step without one: beside a stand-in scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import let_go, v0_5_12, v0_5_18, v0_5_23
from flashmoa_sglang.scheduler import waiting
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.side import Side

from tests.unit.plugin.fake_scheduler import Engine, request, without_those

RELEASES = [v0_5_12, v0_5_18, v0_5_23]


@pytest.fixture(autouse=True)
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why, for each request that is."""
    reasons: list[str] = []

    def drop(engine: Any, which: set[int], why: str) -> None:
        reasons.extend([why] * len(which))
        engine.waiting_queue = without_those(engine, which)

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


def test_requests_stand_before_increments(dropped: list[str]) -> None:
    engine = Engine(50_000, 0.1, [])
    increment, first, second = request(9, 0, stream="a"), request(8, 5), request(7, 5)
    # Nobody is held back for ever.
    increment.flashmoa_held = 99
    engine.waiting_queue = [increment, first, second]
    waiting.prepare(engine, engine.running)
    assert engine.waiting_queue == [first, second, increment]


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
