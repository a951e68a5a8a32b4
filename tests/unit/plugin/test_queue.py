"""Test the queue before a prefill batch, and a step without a batch, with a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE, Release, Release0512, Release0518, Release0523
from flashmoa_sglang.scheduler import queue
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.state import SchedulerState

from tests.unit.plugin.fake_scheduler import FakeScheduler, request

pytestmark = pytest.mark.usefixtures("dropped")


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RELEASE, "check_host_cache", lambda _: None)
    monkeypatch.setattr(RELEASE, "running_batch", lambda scheduler, _arguments: scheduler.running)


def chats(count: int, ratio: float) -> FakeScheduler:
    """Make a pool of 60,000 tokens and chats with almost no limit and short answers so far."""
    return FakeScheduler(
        60_000 - count * 600, ratio, [request(500, 100_000, 100) for _ in range(count)]
    )


def test_chats_without_a_limit_leave_room_for_streams(dropped: list[str]) -> None:
    scheduler = chats(16, ratio=0.1)
    scheduler.waiting_queue = [request(2000, 0, stream="a")]
    queue.prepare(scheduler, scheduler.running)
    assert not dropped


def test_chats_expected_to_become_long_leave_streams_no_room(dropped: list[str]) -> None:
    scheduler = chats(16, ratio=1.0)
    scheduler.waiting_queue = [request(2000, 0, stream="a")]
    queue.prepare(scheduler, scheduler.running)
    assert dropped == ["no room in the KV pool"]


def test_requests_are_queued_before_increments(dropped: list[str]) -> None:
    scheduler = FakeScheduler(50_000, 0.1, [])
    increment, first, second = request(9, 0, stream="a"), request(8, 5), request(7, 5)
    # It has been held back so often that it is not held back again.
    increment.flashmoa.held = 99
    scheduler.waiting_queue = [increment, first, second]
    queue.prepare(scheduler, scheduler.running)
    assert scheduler.waiting_queue == [first, second, increment]


def test_a_request_that_is_held_back_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = FakeScheduler(50_000, 0.1, [])
    requests = [request(10 + n, 5) for n in range(5)]
    scheduler.waiting_queue = list(requests)

    def prepare(scheduler: Any, _running: Any) -> list[Any]:
        scheduler.waiting_queue = requests[:1] + requests[2:4]
        return [requests[1], requests[4]]

    def build(scheduler: Any, **_: Any) -> Any:
        scheduler.waiting_queue = [scheduler.waiting_queue[2], newcomer]
        return None, scheduler.running

    newcomer = request(3, 3)
    monkeypatch.setattr("flashmoa_sglang.scheduler.batches.prepare", prepare)
    monkeypatch.setattr(RELEASE, "split_batches", lambda *_: (None, scheduler.running))
    next_prefill_batch(build, scheduler)
    assert scheduler.waiting_queue == [requests[1], requests[3], requests[4], newcomer]


def test_room_for_the_rest_of_a_chunked_prompt_is_kept(dropped: list[str]) -> None:
    scheduler = FakeScheduler(7000, 0.5, [])
    scheduler.chunked_req = request(9000, 0, stream="a")
    scheduler.chunked_req.fill_ids = [1] * 4000
    scheduler.chunked_req.extend_range = SimpleNamespace(end=4000)
    scheduler.chunked_req.extend_end = 4000
    scheduler.waiting_queue = [request(2500, 0, stream="b")]
    queue.prepare(scheduler, scheduler.running)
    assert dropped


def test_a_compiled_grammar_is_noticed_while_streams_wait_for_room() -> None:
    """Memory is short, so that the stream waits while others decode."""
    scheduler = FakeScheduler(500, 0.1, [request(500, 1000, 10)], total=1600)
    increment, structured = request(10, 0, stream="a"), request(20, 5)
    scheduler.waiting_queue = [increment]
    scheduler.grammar_manager.ready = [structured]
    assert next_prefill_batch(_never, scheduler) in (None, (None, scheduler.running))
    assert scheduler.waiting_queue == [increment, structured]


def test_a_compiled_grammar_is_noticed_while_prefills_wait_for_saturation() -> None:
    scheduler = FakeScheduler(50_000, 0.1, [request(500, 1000, 10)])
    first, structured = request(10, 5), request(20, 5)
    scheduler.waiting_queue, scheduler.grammar_manager.ready = [first], [structured]
    scheduler.flashmoa.saturation_gate = SimpleNamespace(tokens=9000, holds=lambda *_: True)
    scheduler.flashmoa.queued = SimpleNamespace(count=lambda *_: 10)
    assert next_prefill_batch(_never, scheduler) in (None, (None, scheduler.running))
    assert scheduler.waiting_queue == [first, structured]


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a batch is built")


def test_the_prefetch_of_a_request_that_is_dropped_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[str] = []
    monkeypatch.setattr(RELEASE, "release_prefetch", lambda _, req: released.append(req.rid))
    scheduler = SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode="null"))
    queue.let_go(scheduler, SimpleNamespace(rid="dropped"))
    assert released == ["dropped"]


@pytest.mark.parametrize("release", [Release0512(), Release0518()])
@pytest.mark.parametrize("storage", [True, False])
def test_a_prefetch_from_storage_is_released_by_id(release: Release, storage: bool) -> None:
    released: list[str] = []
    tree = SimpleNamespace(release_aborted_request=released.append)
    scheduler = SimpleNamespace(enable_hicache_storage=storage, tree_cache=tree)
    release.release_prefetch(scheduler, SimpleNamespace(rid="dropped"))
    assert released == (["dropped"] if storage else [])


def test_0_5_23_releases_a_prefetch_itself() -> None:
    released: list[Any] = []
    req = SimpleNamespace(rid="dropped")
    Release0523().release_prefetch(SimpleNamespace(_release_aborted_request=released.append), req)
    assert released == [req]


@pytest.mark.parametrize("release", [Release0512(), Release0518(), Release0523()])
def test_room_is_kept_for_the_share_of_output_that_sglang_expects(release: Release) -> None:
    scheduler = FakeScheduler(0, 0.3, [])
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
    state: Any = SimpleNamespace(options=options, publishes_early=True)
    assert SchedulerState.shares(state, SimpleNamespace(**scheduler)) is shares
