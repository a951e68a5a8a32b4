"""Fixtures of the plugin's unit tests."""

import sys
from collections.abc import Generator
from types import SimpleNamespace

import pytest
from flashmoa_sglang.scheduler import streams
from flashmoa_sglang.sglang import torchvision_ops
from flashmoa_sglang.sglang.releases import RELEASE

from tests.unit.plugin.scheduler.fakes import FakeScheduler

# A test may import SGLang only after this call.
torchvision_ops.allow_mismatched_build()


@pytest.fixture(scope="module")
def fake_release() -> Generator[None]:
    """Let ``FakeScheduler`` do without SGLang, which takes seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        messages = SimpleNamespace(AbortReq=SimpleNamespace)
        patch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
        results = SimpleNamespace(NO_TOKEN="no token", OTHER="other", CONTINUE="continue")
        policy = SimpleNamespace(AddReqResult=results)
        patch.setitem(sys.modules, "sglang.srt.managers.schedule_policy", policy)
        patch.setattr(RELEASE, "tokenizer_channel", lambda scheduler: scheduler)
        patch.setattr(RELEASE, "to_tokenizer", lambda scheduler, sent: scheduler.sent.append(sent))
        patch.setattr(RELEASE, "running_batch", lambda scheduler, _arguments: scheduler.running)
        patch.setattr(RELEASE, "split_batches", lambda _scheduler, result: result)
        patch.setattr(RELEASE, "no_batch", lambda running: (None, running))
        patch.setattr(RELEASE, "resolve_arguments", lambda arguments: arguments)
        patch.setattr(RELEASE, "pipeline_stages", lambda _: 1)
        patch.setattr(RELEASE, "dp_rank", lambda _: 0)
        patch.setattr(RELEASE, "why_no_rides", lambda _: "")
        patch.setattr(RELEASE, "why_late", lambda _: "")
        patch.setattr(RELEASE, "check_host_cache", lambda _: None)
        patch.setattr(RELEASE, "release_prefetch", lambda *_: None)
        patch.setattr(RELEASE, "cached_tokens", lambda _: 0)
        patch.setattr(RELEASE, "computed_until", lambda req: req.computed)
        patch.setattr(RELEASE, "uncached_tokens", lambda _tree, req: req.flashmoa.uncached)
        patch.setattr(RELEASE, "key_of", lambda tokens, _req: list(tokens))
        patch.setattr(streams, "match_and_pin", lambda tree, key: tree.match_and_pin(key))
        yield


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def any_increment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let increments have any number of tokens."""
    monkeypatch.setattr(streams, "fewest_tokens", lambda *_: 1)
