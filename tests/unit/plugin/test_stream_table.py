"""The stream table with an engine that is slow, that refuses, or that has a bug."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http import bodies  # noqa: E402
from flashmoa_sglang.http.engine import Engine  # noqa: E402
from flashmoa_sglang.http.errors import EngineBusy, EngineDraining, EngineFailed  # noqa: E402
from flashmoa_sglang.http.stream import Terms  # noqa: E402
from flashmoa_sglang.http.streams import StreamTable  # noqa: E402
from flashmoa_sglang.messages import STREAM_OPENED, RequestMark  # noqa: E402
from flashmoa_sglang.plugin import unload_adapter  # noqa: E402
from flashmoa_sglang.releases import RELEASE, Release0523  # noqa: E402
from starlette.requests import Request  # noqa: E402

from tests.unit.plugin.fake_engine import FakeEngine, open_stream  # noqa: E402

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is true."""
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.005)


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def table(engine: FakeEngine) -> StreamTable:
    return StreamTable(engine)  # type: ignore[arg-type]


async def test_a_stream_is_opened_in_its_scheduler_and_released_once(
    engine: FakeEngine, table: StreamTable
) -> None:
    stream = open_stream(table)
    await until(lambda: engine.tokens_of(stream.id) == [*range(100)])
    assert engine.opened == [stream.id] and engine.released == []
    for _ in range(2):
        table.close(stream, "deleted")
    assert engine.released == [stream.id]


async def test_a_stream_expires_while_another_one_is_being_opened(
    engine: FakeEngine, table: StreamTable
) -> None:
    engine.opens.clear()
    busy = open_stream(table)
    silent = open_stream(table, ttl=0.05, tokens=1)
    await until(lambda: silent.closed == "expired")
    assert busy.closed is None and engine.released == [silent.id]
    engine.opens.set()
    table.close(busy, "deleted")


async def test_a_stream_that_its_request_uses_does_not_expire(table: StreamTable) -> None:
    used, other = open_stream(table, ttl=0.05), open_stream(table, ttl=0.1)
    table.claim(used)
    await until(lambda: other.closed)
    assert used.closed is None and used.deadline < other.deadline
    table.unclaim(used)
    await until(lambda: used.closed == "expired")


async def test_draining_ends_all_streams_that_no_request_uses(
    engine: FakeEngine, table: StreamTable
) -> None:
    idle, used = open_stream(table), open_stream(table)
    table.claim(used)
    engine.draining = True
    await until(lambda: idle.closed == "drained")
    assert used.closed is None and engine.released == [idle.id]
    with pytest.raises(EngineDraining):
        open_stream(table)
    table.close(used, "used")


async def test_no_stream_is_open_while_the_engine_is_changed(
    engine: FakeEngine, table: StreamTable
) -> None:
    stream = open_stream(table)
    async with table.closed():
        assert stream.closed == "drained" and engine.released == [stream.id]
        # A report comes after what the scheduler had begun.
        assert engine.reports
        with pytest.raises(EngineDraining, match="being changed"):
            open_stream(table)
    later = open_stream(table)
    await until(lambda: engine.tokens_of(later.id))
    table.close(later, "deleted")


async def test_an_adapter_that_is_unloaded_ends_its_own_streams_only(
    engine: FakeEngine, table: StreamTable
) -> None:
    streams = {name: open_stream(table, adapter=name) for name in (None, "a", "b")}
    manager = SimpleNamespace(flashmoa_table=table)

    async def unload(_manager: object, obj: Any) -> str:
        assert engine.released == [streams["a"].id] and engine.reports
        with pytest.raises(EngineDraining, match="being changed"):
            open_stream(table, adapter="a")
        # SGLang unloads one adapter to load another for a stream that is being opened.
        streams["c"] = open_stream(table, adapter="c")
        return obj.lora_name

    unloaded = SimpleNamespace(lora_name="a")
    assert await unload_adapter(unload, manager, unloaded) == "a"
    assert {name for name, stream in streams.items() if stream.closed} == {"a"}
    streams["a"] = open_stream(table, adapter="a")
    for stream in streams.values():
        table.close(stream, "deleted")


async def test_a_stream_that_cannot_be_opened_fails_and_stays_valid(
    engine: FakeEngine, table: StreamTable, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refusal = EngineFailed("SGLang has aborted the prefill: no such adapter.")
    stream = open_stream(table)
    await until(lambda: stream.failure)
    assert "no such adapter" in (stream.failure or "")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert stream.closed is None and table.find(stream.id) == (stream, "open")
    before = engine.tokens_of(stream.id)
    table.append(stream, 0, [7] * 50, end=True)
    engine.refusal = None
    # Others are prefilled, and this one is not handed over any more.
    other = open_stream(table)
    await until(lambda: engine.tokens_of(other.id))
    assert engine.tokens_of(stream.id) == before
    for one in (stream, other):
        table.close(one, "deleted")


async def test_a_stream_that_ends_before_it_is_refused_is_no_warning(
    engine: FakeEngine, table: StreamTable, caplog: pytest.LogCaptureFixture
) -> None:
    engine.opens.clear()
    engine.refusal = EngineFailed("refused")
    stream = open_stream(table)
    await until(lambda: engine.opened)
    table.close(stream, "deleted")
    before = asyncio.all_tasks()
    engine.opens.set()
    await until(lambda: len(asyncio.all_tasks()) < len(before))
    assert stream.failure is None and caplog.records == []


async def test_a_bug_is_logged_once_and_later_streams_work(
    engine: FakeEngine,
    table: StreamTable,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashmoa_sglang.http.streams._PAUSE_AFTER_ERROR", 0.01)
    engine.mistake = ZeroDivisionError("a mistake of ours")
    first = open_stream(table)
    await until(lambda: first.failure)
    again = open_stream(table)
    await until(lambda: again.failure)
    assert "a mistake of ours" in (first.failure or "")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    engine.mistake = None
    # The stream that failed is not prefilled any more, but valid. The next one is prefilled.
    assert not first.may_grow() and first.closed is None
    second = open_stream(table)
    await until(lambda: engine.tokens_of(second.id) == [*range(100)])
    assert engine.tokens_of(first.id) == []
    for stream in (first, again, second):
        table.close(stream, "deleted")


async def test_the_tables_tasks_end_with_the_last_stream(table: StreamTable) -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        stream = open_stream(table)
        assert asyncio.all_tasks() - before
        table.close(stream, "deleted")
        await until(lambda: not asyncio.all_tasks() - before)


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
    overrides = [("memory", {"chunked_prefill_size": 64})]
    given = {"chunked_prefill_size": None, "max_prefill_tokens": 16384}
    arguments = SimpleNamespace(**given, _resolved_overrides=overrides)
    engine = Engine(Manager(server_args=arguments))
    assert engine.max_unchunked_prompt == 64


@pytest.mark.parametrize(
    "raised", [None, EngineFailed("SGLang stops"), EngineBusy("SGLang cannot take this: full")]
)
async def test_a_stream_is_open_once_its_scheduler_says_so(raised: Exception | None) -> None:
    engine = Engine(Manager())
    marks: list[RequestMark] = []

    async def generate(_tokens: object, mark: RequestMark, **_: object) -> None:
        marks.append(mark)
        # SGLang raises this when a scheduler ends a request.
        raise raised or EngineBusy(f"SGLang cannot take this: {STREAM_OPENED}")

    engine.generate = generate  # type: ignore[assignment]
    if raised is None:
        await engine.open_stream("a", Terms())
    else:
        with pytest.raises(type(raised), match=str(raised)):
            await engine.open_stream("a", Terms())
    assert marks == [RequestMark("a", opens=True)]


@pytest.mark.parametrize(
    ("reserved", "scheduler", "most"), [(0, None, 999), (7, None, 992), (0, 95, 94), (0, 5000, 999)]
)
async def test_the_longest_prompt_is_the_longest_that_sglang_accepts(
    reserved: int, scheduler: int | None, most: int
) -> None:
    manager = Manager(num_reserved_tokens=reserved, max_req_input_len=scheduler)
    assert Engine(manager).max_prompt_tokens == most


def named_rank(table: StreamTable, *values: str) -> int | None:
    headers = [(b"x-data-parallel-rank", value.encode("latin-1")) for value in values]
    return table.named_rank(Request({"type": "http", "headers": headers}))


async def test_request_names_a_rank_or_none(engine: FakeEngine, table: StreamTable) -> None:
    engine.data_parallel_ranks = 3
    assert table.named_rank(None) is named_rank(table) is None
    assert [named_rank(table, str(rank)) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("value", ["2", "-1", "", "one", "1.0", "\u00b2", " 1"])
async def test_rank_that_does_not_exist_is_refused(
    engine: FakeEngine, table: StreamTable, value: str
) -> None:
    engine.data_parallel_ranks = 2
    with pytest.raises(ValueError, match="whole number below 2, the number of data-parallel ranks"):
        named_rank(table, value)
