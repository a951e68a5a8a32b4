"""The stream table with an engine that is slow, or that raises what it should not."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.costs import UNMEASURED  # noqa: E402
from flashmoa_sglang.http import bodies  # noqa: E402
from flashmoa_sglang.http.engine import Engine, Prefilled  # noqa: E402
from flashmoa_sglang.http.errors import EngineDraining  # noqa: E402
from flashmoa_sglang.http.stream import PromptStream  # noqa: E402
from flashmoa_sglang.http.streams import StreamTable  # noqa: E402
from flashmoa_sglang.releases import RELEASE, Release0523  # noqa: E402

pytestmark = pytest.mark.anyio


class SlowEngine:
    """A fake engine whose prefills last until ``go_on`` is set."""

    max_prompt_tokens = 1000
    costs = UNMEASURED
    draining = False

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.started = asyncio.Event()
        self.aborted: list[str] = []
        self.mistake: Exception | None = None

    async def prefill(self, input_ids: list[int], **_: Any) -> Prefilled:
        self.started.set()
        await self.go_on.wait()
        return Prefilled(len(input_ids), 0, 0.1)

    def others_active(self) -> bool:
        return False

    @property
    def page_size(self) -> int:
        """Raise the mistake; only the prefilling task reads this."""
        if self.mistake is not None:
            raise self.mistake
        return 1

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        self.go_on.set()

    def release(self, stream: str) -> None: ...

    def when_room(self, _callback: object) -> None: ...


def open_stream(table: StreamTable, ttl: float = 60.0, tokens: int = 100) -> PromptStream:
    stream = PromptStream(ttl_seconds=ttl, buffer=None)
    table.add(stream, [5] * tokens)
    table.open(stream)
    return stream


async def wait_for_end(stream: PromptStream) -> str | None:
    """Return how a stream ended, once it has."""
    with anyio.fail_after(5):
        while stream.closed is None:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
    return stream.closed


@pytest.fixture
async def engine() -> SlowEngine:
    return SlowEngine()


async def test_a_stream_expires_while_another_one_is_prefilled(engine: SlowEngine) -> None:
    table = StreamTable(engine)  # type: ignore[arg-type]
    busy = open_stream(table)
    await engine.started.wait()
    silent = open_stream(table, ttl=0.05, tokens=1)
    assert await wait_for_end(silent) == "expired"
    assert busy.closed is None and not engine.go_on.is_set()
    table.close(busy, "deleted")


async def test_draining_stops_a_running_prefill(engine: SlowEngine) -> None:
    table = StreamTable(engine)  # type: ignore[arg-type]
    busy = open_stream(table)
    await engine.started.wait()
    engine.draining = True
    assert await wait_for_end(busy) == "drained"
    assert len(engine.aborted) == 1
    with pytest.raises(EngineDraining):
        open_stream(table)


async def test_a_bug_is_logged_once_and_later_streams_work(
    engine: SlowEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmoa_sglang.http.supervised_tasks._PAUSE_AFTER_ERROR", 0.01)
    table = StreamTable(engine)  # type: ignore[arg-type]
    engine.mistake = ZeroDivisionError("a mistake of ours")
    with caplog.at_level(logging.ERROR):
        first = open_stream(table)
        with anyio.fail_after(5):
            while first.failure is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.sleep(0.05)
    assert "a mistake of ours" in first.failure
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    engine.mistake = None
    # The stream that failed is not prefilled any more, but valid. The next one is prefilled.
    assert not first.may_grow() and first.closed is None
    engine.go_on.set()
    second = open_stream(table)
    with anyio.fail_after(5):
        while second.prefilled < 100:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    for stream in (first, second):
        table.close(stream, "deleted")


async def test_the_tables_tasks_end_with_the_last_stream(engine: SlowEngine) -> None:
    engine.go_on.set()
    table = StreamTable(engine)  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    for _ in range(3):
        stream = open_stream(table)
        assert asyncio.all_tasks() - before
        table.close(stream, "deleted")
        with anyio.fail_after(5):
            while asyncio.all_tasks() - before:  # noqa: ASYNC110
                await anyio.sleep(0.01)


class Manager(SimpleNamespace):
    """The parts of a ``TokenizerManager`` that choosing a rank and counting room need."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(
            _result_dispatcher=SimpleNamespace(_mapping={}),
            tokenizer=None,
            model_config=SimpleNamespace(context_len=1000),
            num_reserved_tokens=0,
            max_req_input_len=None,
            server_args=SimpleNamespace(dp_size=1),
        )
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("fields", "served", "adapter"),
    [
        ({"model": "base:a"}, "base", "a"),
        ({"model": "base:a"}, "/models/base", "a"),
        ({"model": "s3://bucket/m"}, "s3://bucket/m", None),
        ({"model": "qwen:8b:a", "lora_path": "b"}, "qwen:8b", "a"),
        ({"lora_path": "b"}, "base", "b"),
        ({}, "base", None),
    ],
)
def test_an_adapter_is_named_with_the_model_or_by_lora_path(
    fields: dict[str, str], served: str, adapter: str | None
) -> None:
    assert bodies.Prompt(text="x", **fields).terms(served).lora_path == adapter


async def test_the_arguments_are_those_that_sglang_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # SGLang has these from 0.5.18 on.
    pytest.importorskip("sglang.srt.arg_groups.overrides")
    monkeypatch.setattr(RELEASE, "resolve_arguments", Release0523().resolve_arguments)
    overrides = [("memory", {"chunked_prefill_size": 64}), ("backend", {"page_size": 16})]
    given = {"chunked_prefill_size": None, "max_prefill_tokens": 16384, "page_size": None}
    arguments = SimpleNamespace(**given, _resolved_overrides=overrides)
    engine = Engine(Manager(server_args=arguments))
    assert engine.max_unchunked_prompt == 64
    assert engine.page_size == 16


@pytest.mark.parametrize(
    ("reserved", "scheduler", "most"), [(0, None, 999), (7, None, 992), (0, 95, 94), (0, 5000, 999)]
)
async def test_the_longest_prompt_is_the_longest_that_sglang_accepts(
    reserved: int, scheduler: int | None, most: int
) -> None:
    manager = Manager(num_reserved_tokens=reserved, max_req_input_len=scheduler)
    assert Engine(manager).max_prompt_tokens == most
