"""When KV is published and pinned: before its forward, or with its result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang import asyncep
from flashmoa_sglang.cpu import torchvision_ops
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler import batches, results
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.scheduler.request import RequestState
from flashmoa_sglang.scheduler.shared_prefill import SharedPrefill, _Follower
from flashmoa_sglang.scheduler.state import ForwardTimer, SchedulerState

# This must come before anything imports SGLang.
torchvision_ops.allow_mismatched_build()


class RadixCache:
    """A tree that keeps KV in the pool only."""


def scheduler(role: str, overlap: bool) -> Any:
    return SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_eagle=lambda: False),
        tree_cache=RadixCache(),
        server_args=SimpleNamespace(disaggregation_mode=role),
        enable_overlap=overlap,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        page_size=1,
        chunked_req=None,
    )


def increment(stream: str = "s") -> Any:
    mark = RequestMark(stream).to_custom_params()
    return SimpleNamespace(
        rid="r",
        sampling_params=SimpleNamespace(custom_params=mark, max_new_tokens=0),
        finished=lambda: False,
        to_finish=None,
        origin_input_ids=[1] * 5,
        output_ids=[],
        cached_tokens=2,
        return_logprob=False,
        is_prefill_only=False,
    )


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    requests: list[Any] = []
    monkeypatch.setattr(RELEASE, "tokenizer_channel", lambda _: None)
    monkeypatch.setattr(RELEASE, "why_no_rides", lambda _: "")
    monkeypatch.setattr(RELEASE, "copies_kv", lambda _: False)
    monkeypatch.setattr(RELEASE, "publish", lambda _, req: requests.append(req))
    monkeypatch.setattr(batches, "pin_published", lambda *_: Pin("early", None))
    monkeypatch.setattr(RELEASE, "radix_key", lambda *_: None)
    monkeypatch.setattr(RELEASE, "to_tokenizer", lambda *_: None)
    monkeypatch.setattr(results, "match_and_pin", lambda *_: (Pin("late", None), 5))
    return requests


@pytest.mark.parametrize(
    ("role", "overlap", "early"),
    [
        ("null", False, True),
        ("null", True, True),
        ("decode", True, True),
        ("prefill", False, True),
        ("prefill", True, False),
    ],
)
def test_a_prefill_engine_under_the_overlap_schedule_publishes_no_kv_before_it_is_computed(
    role: str, overlap: bool, early: bool, published: list[Any]
) -> None:
    """It sends cached KV, which the forward before may still be writing."""
    engine = scheduler(role, overlap)
    engine.flashmoa = state = SchedulerState(engine)
    req = increment()
    batch = SimpleNamespace(reqs=[req], extend_num_tokens=5, decoding_reqs=None)
    batches._settle(engine, batch, batches.Step())
    assert published == ([req] if early else [])
    assert ("s" in state.pins) is early
    assert state.shares(engine) is early
    # What has been published is not inserted once more.
    assert getattr(req, "skip_radix_cache_insert", False) is early
    # Now the request has been computed.
    streamer = SimpleNamespace(
        tree_cache=SimpleNamespace(flashmoa=state), send_to_detokenizer="usual"
    )
    results.stream_output(lambda *_: None, streamer, [req], False)
    assert "s" in state.pins
    assert state.pins._pins["s"].node == ("early" if early else "late")


def test_a_timed_forward_is_reported_with_speculative_decoding(
    published: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculative decoding SGLang counts no request as prefill-only."""
    messages: list[Any] = []
    monkeypatch.setattr(RELEASE, "to_tokenizer", lambda _, message: messages.append(message))
    # It would import SGLang, which on 0.5.12 warns of missing drivers.
    monkeypatch.setattr(asyncep, "_own_offloader", lambda: None)
    engine = scheduler("null", True)
    state: Any = SimpleNamespace(
        timer=ForwardTimer(engine), role="null", tokenizer_channel="direct", late_kv=""
    )
    req = increment()
    req.sampling_params.custom_params = RequestMark(timed=True).to_custom_params()
    state.timer.start([req], 4, 0)
    channels: list[Any] = []
    streamer = SimpleNamespace(
        tree_cache=SimpleNamespace(flashmoa=state), send_to_detokenizer="usual"
    )
    results.stream_output(
        lambda streamer, *_: channels.append(streamer.send_to_detokenizer), streamer, [req], False
    )
    assert [message.rid for message in messages] == ["r"]
    assert channels == ["direct"]


def test_prefixes_evicted_while_a_request_waited_are_not_counted_as_saved() -> None:
    class Request:
        flashmoa = RequestState(first_wait=500)

    req = Request()
    adder = SimpleNamespace(can_run_list=[req])
    batch = SharedPrefill(1, within_forward=True)
    batch._take(lambda: None, adder, req, _Follower(100, 100, None))
    assert batch.avoided == 0
