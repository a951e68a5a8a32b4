"""Prompt streams in the HTTP process: their table, handover, paces and ranks."""

import asyncio
import heapq
from array import array
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from flashmoa_sglang.http import bodies, errors, handover
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import MalformedRequest, PromptTooLarge
from flashmoa_sglang.http.hearing.following import Follower
from flashmoa_sglang.http.stream import CallText, PromptStream, Terms
from flashmoa_sglang.http.streams import Pace, StreamTable, choose_rank
from flashmoa_sglang.http.tokens.token_buffer import TokenBuffer
from flashmoa_sglang.messages import STREAM_OPENED, RequestMark, StreamProgress
from flashmoa_sglang.sglang.hooks import without_streams
from flashmoa_sglang.sglang.releases import RELEASE, Release
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from tests.unit.plugin.http.fakes import FakeEngine, open_stream
from tests.unit.plugin.http.tokens.families import canonical
from tests.waiting import until


def encode(text: str) -> list[int]:
    return canonical("digits from the right").encode(text)


def text_stream(table: StreamTable) -> PromptStream:
    """Open a stream of text. Later digits change its last tokens."""
    buffer = TokenBuffer(canonical("digits from the right"), add_special_tokens=False)
    stream = PromptStream(60.0, buffer)
    table.open(stream)
    return stream


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


async def test_a_stream_is_opened_and_released_once(engine: FakeEngine, table: StreamTable) -> None:
    stream = open_stream(table)
    await until(lambda: engine.tokens_of(stream.id) == [*range(100)])
    assert engine.opened == [stream.id] and engine.released == []
    for _ in range(2):
        table.close(stream, "deleted")
    assert engine.released == [stream.id]


async def test_a_stream_expires_while_another_opens(engine: FakeEngine, table: StreamTable) -> None:
    engine.opens.clear()
    busy, silent = open_stream(table), open_stream(table, ttl=0.05, ids=[0])
    await until(lambda: silent.closed == "expired")
    assert busy.closed is None and engine.released == [silent.id]
    engine.opens.set()


async def test_a_used_stream_does_not_expire(table: StreamTable) -> None:
    used, other = open_stream(table, ttl=0.05), open_stream(table, ttl=0.1)
    table.claim(used)
    await until(lambda: other.closed)
    assert used.closed is None and used.deadline < other.deadline
    table.unclaim(used)
    await until(lambda: used.closed == "expired")


async def test_draining_ends_unused_streams(engine: FakeEngine, table: StreamTable) -> None:
    idle, used = open_stream(table), open_stream(table)
    table.claim(used)
    engine.draining = True
    await until(lambda: idle.closed == "drained")
    assert used.closed is None and engine.released == [idle.id]
    with pytest.raises(errors.EngineDraining):
        open_stream(table)


async def test_no_stream_is_open_during_a_change(engine: FakeEngine, table: StreamTable) -> None:
    stream = open_stream(table)
    async with table.closing():
        assert stream.closed == "drained" and engine.released == [stream.id]
        # The scheduler answers a report after its current work.
        assert engine.reports
        with pytest.raises(errors.EngineDraining, match="being changed"):
            open_stream(table)
    later = open_stream(table)
    await until(lambda: engine.tokens_of(later.id))


async def test_unloading_an_adapter_ends_streams(engine: FakeEngine, table: StreamTable) -> None:
    def opened(adapter: str | None) -> PromptStream:
        return open_stream(table, terms=Terms(lora_path=adapter))

    streams = {name: opened(name) for name in (None, "a", "b")}

    async def unload(_manager: object, obj: Any) -> str:
        assert engine.released == [streams["a"].id] and engine.reports
        with pytest.raises(errors.EngineDraining, match="being changed"):
            opened("a")
        # SGLang unloads one adapter to load another for a stream that is being opened.
        streams["c"] = opened("c")
        return obj.lora_name

    manager, unloaded = SimpleNamespace(flashmoa_table=table), SimpleNamespace(lora_name="a")
    assert await without_streams(unload, manager, unloaded) == "a"
    assert {name for name, stream in streams.items() if stream.closed} == {"a"}
    opened("a")


async def test_figures_that_nobody_takes_are_dropped(table: StreamTable) -> None:
    """The endings of their streams are remembered longer."""
    streams: list[PromptStream] = []
    for number in range(600):
        streams.append(open_stream(table, ids=[1]))
        table.close(streams[-1], "used", {"late_tokens": number} if number != 550 else None)
    assert {table.find(stream.id) for stream in streams} == {(None, "used")}
    kept = [stream for stream in streams if table.take_figures(stream.id) is not None]
    assert kept == [*streams[87:550], *streams[551:]]


async def test_a_stream_that_cannot_open_stays_valid(
    engine: FakeEngine, table: StreamTable, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refusal = errors.EngineFailed("SGLang has aborted the prefill: no such adapter.")
    stream = open_stream(table)
    await until(lambda: stream.failure)
    assert "no such adapter" in (stream.failure or "") and levels(caplog) == ["WARNING"]
    assert stream.closed is None and table.find(stream.id) == (stream, "open")
    before = engine.tokens_of(stream.id)
    await table.append(stream, 0, [7] * 50, end=True)
    engine.refusal = None
    # Other streams are prefilled. This one is not handed over any more.
    other = open_stream(table)
    await until(lambda: engine.tokens_of(other.id))
    assert engine.tokens_of(stream.id) == before


async def test_a_refusal_after_the_end_is_no_warning(
    engine: FakeEngine, table: StreamTable, caplog: pytest.LogCaptureFixture
) -> None:
    engine.opens.clear()
    engine.refusal = errors.EngineFailed("refused")
    stream = open_stream(table)
    await until(lambda: engine.opened)
    table.close(stream, "deleted")
    before = asyncio.all_tasks()
    engine.opens.set()
    await until(lambda: len(asyncio.all_tasks()) < len(before))
    assert stream.failure is None and levels(caplog) == []


async def test_a_bug_is_logged_once(
    engine: FakeEngine,
    table: StreamTable,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashmoa_sglang.http.streams._CHECK_SECONDS", 0.01)
    engine.mistake = ZeroDivisionError("a mistake of ours")
    for _ in range(2):
        failed = open_stream(table)
        await until(lambda: failed.failure)  # noqa: B023
    assert "a mistake of ours" in (failed.failure or "") and levels(caplog) == ["ERROR"]
    engine.mistake = None
    # The stream that failed is not prefilled any more, but valid. The next one is prefilled.
    assert not failed.may_grow() and failed.closed is None
    second = open_stream(table)
    await until(lambda: engine.tokens_of(second.id) == [*range(100)])
    assert engine.tokens_of(failed.id) == []


async def test_tasks_end_with_the_last_stream(table: StreamTable) -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        stream = open_stream(table)
        assert asyncio.all_tasks() - before
        table.close(stream, "deleted")
        await until(lambda: not asyncio.all_tasks() - before)


def manager(**fields: Any) -> Any:
    """Make the parts of a ``TokenizerManager`` that choosing a rank and counting room need."""
    usual: dict[str, Any] = {
        "_result_dispatcher": SimpleNamespace(_mapping={}),
        "tokenizer": None,
        "model_config": SimpleNamespace(context_len=1000),
        "num_reserved_tokens": 0,
        "max_req_input_len": None,
        "server_args": SimpleNamespace(dp_size=1),
    }
    return SimpleNamespace(**usual | fields)


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
def test_an_adapter_is_named_in_either_field(
    fields: dict[str, str], served: str, adapter: str | None
) -> None:
    assert bodies.Prompt(text="x", **fields).terms(served).lora_path == adapter


async def test_arguments_are_resolved_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang 0.5.12 has no overrides.
    pytest.importorskip("sglang.srt.arg_groups.overrides")
    monkeypatch.setattr(RELEASE, "resolve_arguments", Release().resolve_arguments)
    overrides = [("memory", {"chunked_prefill_size": 64})]
    given = {"chunked_prefill_size": None, "max_prefill_tokens": 16384}
    arguments = SimpleNamespace(**given, _resolved_overrides=overrides)
    assert Engine(manager(server_args=arguments)).max_unchunked_prompt == 64


@pytest.mark.parametrize(
    "raised",
    [None, errors.EngineFailed("SGLang stops"), errors.EngineBusy("SGLang cannot take this: full")],
)
async def test_a_scheduler_confirms_an_open_stream(raised: Exception | None) -> None:
    engine, marks = Engine(manager()), list[RequestMark]()

    async def generate(_tokens: object, mark: RequestMark, **_: object) -> None:
        marks.append(mark)
        # SGLang raises this when a scheduler ends a request.
        raise raised or errors.EngineBusy(f"SGLang cannot take this: {STREAM_OPENED}")

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
async def test_longest_prompt_is_sglangs(reserved: int, scheduler: int | None, most: int) -> None:
    limits = {"num_reserved_tokens": reserved, "max_req_input_len": scheduler}
    assert Engine(manager(**limits)).max_prompt_tokens == most


@pytest.mark.parametrize(
    "value", ["0", "1", "2", "-1", "", "one", "1.0", "\u00b2", " 1", "9" * 5000]
)
async def test_a_named_rank_must_exist(engine: FakeEngine, table: StreamTable, value: str) -> None:
    engine.data_parallel_ranks = 2
    assert table.named_rank(None) is table.named_rank(SimpleNamespace(headers={})) is None
    header = (b"x-data-parallel-rank", value.encode("latin-1"))
    request = Request({"type": "http", "headers": [header]})
    if value in ("0", "1"):
        assert table.named_rank(request) == int(value)
        return
    with pytest.raises(ValueError, match="whole number below 2, the number of data-parallel ranks"):
        table.named_rank(request)


# Appends: the stream, the number of tokens, whether the stream goes on, and the number of steps of
# other tasks before the next append.
APPENDS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 30), st.integers(0, 7).map(bool), st.integers(0, 8)
    ),
    max_size=25,
)


async def handed_over(engine: FakeEngine, *streams: PromptStream) -> None:
    """Wait until the schedulers know all about these streams."""
    await until(
        lambda: all(
            stream.known_tokens() <= len(engine.tokens_of(stream.id))
            and (stream.ended_at is None or stream.end_sent)
            for stream in streams
        )
    )


@settings(max_examples=40)
@given(appends=APPENDS)
def test_each_token_is_sent_once(appends: list[tuple[int, int, bool, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # So that the handover is in between more often.
        patch.setattr(handover, "_GATHER_SECONDS", 0)
        asyncio.run(append_all(appends))


async def append_all(appends: list[tuple[int, int, bool, int]]) -> None:
    engine: Any = FakeEngine()
    table = StreamTable(engine)
    streams = [open_stream(table, ids=range(size)) for size in (0, 5, 20)]
    for position, (number, tokens, goes_on, others) in enumerate(appends):
        stream = streams[number]
        if stream.ended_at is None:
            piece = [1000 * position + n for n in range(tokens)]
            await table.append(stream, stream.next_seq, piece, end=not goes_on)
        for _ in range(others):
            await anyio.lowlevel.checkpoint()
    await handed_over(engine, *streams)
    for stream in streams:
        table.close(stream, "deleted")
        assert engine.tokens_of(stream.id) == [*stream.ids]
        ends = [n for n, message in enumerate(engine.handed) if stream.id in message.ended]
        assert len(ends) == (stream.ended_at is not None)
        tokens = [n for n, one in enumerate(engine.handed) if stream.id in dict_of(one.tokens)]
        assert not ends or not tokens or ends[0] >= tokens[-1]
    # Streams share messages, and none is empty.
    assert all(message.tokens or message.ended for message in engine.handed)


def dict_of(tokens: Sequence[tuple[str, bytes, bool]]) -> dict[str, bool]:
    """Return the streams of a message, and whether each grows."""
    assert len({id_ for id_, _, _ in tokens}) == len(tokens)
    return {id_: grows for id_, _, grows in tokens}


@pytest.mark.parametrize(
    ("first", "again", "is_same"),
    [
        (("one ", False), ("one ", False), True),
        (("one ", False), ("one", False), False),
        (("one ", False), ("one ", True), False),
        (("", True), ("", True), True),
        (([1, 2], False), ([1, 2], False), True),
        (([1, 2], False), ([2, 1], False), False),
        (([1], True), ([], True), False),
        (("one ", False, 0), ("one ", False, 0), True),
        (("one ", False, 0), ("one ", False), False),
    ],
)
async def test_the_last_append_may_be_repeated(
    table: StreamTable, first: tuple[Any, ...], again: tuple[Any, ...], is_same: bool
) -> None:
    stream = text_stream(table) if isinstance(first[0], str) else open_stream(table, ids=[])
    await table.append(stream, 0, *first)
    state = stream.state()
    if is_same:
        await table.append(stream, 0, *again)
    else:
        with pytest.raises(errors.StreamOutOfOrder, match="as append 1") as refused:
            await table.append(stream, 0, *again)
        assert refused.value.details == {"expected_seq": 1}
    assert stream.state() == state


async def test_changed_tokens_are_sent_again(engine: FakeEngine, table: StreamTable) -> None:
    stream = text_stream(table)
    for number in range(8):
        await table.append(stream, number, "1234567890123", end=number == 7)
        await handed_over(engine, stream)
    assert any(message.kept for message in engine.handed)
    assert engine.tokens_of(stream.id) == encode("1234567890123" * 8)
    ahead, total = table.streamed["ahead"], table.streamed["total"]
    assert ahead < total == len(engine.tokens_of(stream.id))


async def test_refused_replacements_do_nothing(engine: FakeEngine, table: StreamTable) -> None:
    stream = text_stream(table)
    await table.append(stream, 0, "1234567890" * 9, end=False)
    known, engine.max_prompt_tokens = list(stream.known()), 20
    with pytest.raises(PromptTooLarge):
        await table.append(stream, 1, "7 " * 30, end=False, start=3)
    with pytest.raises(MalformedRequest, match="start is 91, but the stream's text has only 90"):
        await table.append(stream, 1, "7", end=False, start=91)
    assert list(stream.known()) == known and stream.next_seq == 1
    await table.append(stream, 1, "", end=True, start=3)
    await handed_over(engine, stream)
    assert engine.tokens_of(stream.id) == encode("123")


async def test_following_waits_for_the_request(engine: FakeEngine, table: StreamTable) -> None:
    followers = list[Follower]()
    table.calls = SimpleNamespace(  # type: ignore[assignment]
        follow=followers.append, unfollow=Follower.stop
    )
    stream = text_stream(table)

    def text() -> str:
        assert stream.buffer is not None
        return stream.buffer.text

    await table.append(stream, 0, CallText("an id"), end=False)
    (follower,) = followers
    async with stream.growing:
        follower.note("one ")
        await anyio.wait_all_tasks_blocked()
        assert text() == ""
        follower.note("two ")
    await until(lambda: text() == "one two ")
    # The request comes, and is refused.
    table.claim(stream)
    follower.note("three ")
    await anyio.wait_all_tasks_blocked()
    assert text() == "one two "
    table.unclaim(stream)
    await until(lambda: text() == "one two three ")
    assert follower.written == len(text())
    with pytest.raises(MalformedRequest, match="has 14 characters of the call"):
        await table.append(stream, 1, "four", end=False)
    # An append that is refused does not end the following.
    known, engine.max_prompt_tokens = len(stream.known()), 9
    with pytest.raises(PromptTooLarge):
        await table.append(stream, 1, "7 " * 30, end=False, start=0)
    follower.note("4 ")
    await until(lambda: text() == "one two three 4 ")
    # Text that does not fit ends it.
    follower.note("7 " * 30)
    follower.note("8 ")
    await until(lambda: follower._task is None)
    assert text() == "one two three 4 " and len(stream.known()) >= known
    await table.append(stream, 1, "one four", end=True, start=0)
    follower.note("five")
    await anyio.wait_all_tasks_blocked()
    assert text() == "one four" and stream.follower is None


async def test_a_stream_grows_with_its_appends(engine: FakeEngine, table: StreamTable) -> None:
    streams = [open_stream(table, ids=range(10)) for _ in range(5)]
    await handed_over(engine, *streams)
    assert len(engine.handed) == 1  # They share a message.
    await table.append(streams[0], 0, [1], end=False)
    await handed_over(engine, *streams)
    assert [dict_of(one.tokens)[streams[0].id] for one in engine.handed] == [False, True]


async def test_no_end_is_sent_before_a_request(engine: FakeEngine, table: StreamTable) -> None:
    used, other = [open_stream(table, ids=range(10)) for _ in range(2)]
    await table.append(used, 0, [1], end=True)
    await table.append(other, 0, [1], end=True)
    table.claim(used)
    await handed_over(engine, other)
    assert not used.end_sent
    assert [id_ for message in engine.handed for id_ in message.ended] == [other.id]
    # The request was refused, so the stream goes on.
    table.unclaim(used)
    await handed_over(engine, used)
    assert engine.tokens_of(used.id) == [*used.ids]
    assert [id_ for message in engine.handed for id_ in message.unclaimed] == [used.id]


async def test_a_pinned_prompt_is_sent_with_its_end(
    engine: FakeEngine, table: StreamTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table._handover, "_end_grace", 60.0)
    asked = SimpleNamespace(priority=None, extra_key=None, lora_path=None)
    table.open(table.make_pinned(asked, {}, range(100), 60.0))
    await until(lambda: engine.handed)
    (stream,) = engine.opened
    assert engine.tokens_of(stream) == [*range(100)] and engine.handed[0].ended == (stream,)


async def test_unopened_streams_delay_no_others(engine: FakeEngine, table: StreamTable) -> None:
    """A scheduler in a long forward answers nothing, and the rank beside it may be idle."""
    engine.opens.clear()
    first = open_stream(table, ids=range(10))
    await handed_over(engine, first)
    table.close(first, "deleted")
    await until(lambda: engine.cancelled == [first.id])
    second = open_stream(table, ids=range(10))
    await handed_over(engine, second)
    assert engine.tokens_of(second.id) == [*second.ids]


async def test_progress_is_noted_in_states(engine: FakeEngine, table: StreamTable) -> None:
    first, second = open_stream(table), open_stream(table, ids=range(50))
    await handed_over(engine, first, second)
    assert first.state()["prefilling"]
    increments = (
        (first.id, 64, 64, 0.5, 0.02), ("unknown", 9, 9, 0.1, 0.0), (second.id, 40, 0, 0.0, 0.0)
    )  # fmt: skip
    engine.reports_progress(StreamProgress(increments, ((second.id, True),)))
    assert second.state()["waits_for_room"] and not first.state()["waits_for_room"]
    engine.reports_progress(StreamProgress(((first.id, 100, 30, 0.25, 0.0),)))
    assert second.state()["waits_for_room"]
    # Tokens that other requests have computed are no increment.
    assert (second.prefilled, second.computed, second.increments) == (40, 0, 0)
    assert (first.prefilled, first.computed, first.increments) == (100, 94, 2)
    assert [(span.tokens, span.delay_seconds) for span in first.spans] == [(64, 0.02), (30, 0.0)]
    assert not second.spans
    assert first.spans[0].end - first.spans[0].start == pytest.approx(0.5)
    assert not first.state()["prefilling"]
    # Its KV is evicted, and computed once more.
    engine.reports_progress(StreamProgress(((first.id, 0, 0, 0.0, 0.0),), ((second.id, False),)))
    assert first.state()["prefilling"] and (first.prefilled, first.computed) == (0, 0)
    assert not second.state()["waits_for_room"]
    engine.reports_progress(StreamProgress(((first.id, 100, 100, 0.5, 0.0),)))
    assert (first.prefilled, first.computed, first.increments) == (100, 100, 3)


@pytest.mark.usefixtures("table")
async def test_a_schedulers_counts_reach_the_metrics(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, int]] = []

    def count(name: str, amount: int) -> None:
        counted.append((name, amount))

    monkeypatch.setattr(handover.metrics, "count", count)
    engine.reports_progress(StreamProgress(duplicates_avoided=30, gave_way=2))
    assert counted == [("duplicate_tokens_avoided", 30), ("streams_gave_way", 2)]


@given(moments=st.lists(st.floats(0, 5), max_size=50), streams=st.integers(0, 300))
def test_appends_are_neither_immediate_nor_late(moments: list[float], streams: int) -> None:
    pace, slower = Pace(), Pace(slowdown=4)
    for now in sorted(moments):
        seconds = pace.next(now, streams)
        assert 0.04 - 1e-9 <= seconds <= 2 * max(0.04, 0.005 * streams) + 1e-9
        assert slower.next(4 * now, streams) == pytest.approx(4 * seconds)


@pytest.mark.parametrize(
    ("streams", "around"),
    [(1, 0.04), (5, 0.04), (8, 0.04), (30, 0.15), (50, 0.25), (100, 0.5), (256, 1.28)],
)
def test_appends_of_many_streams_are_spread(streams: int, around: float) -> None:
    pace = Pace()
    turns = [0.0] * streams
    seen: list[float] = []
    while len(seen) < 20 * streams:
        now = heapq.heappop(turns)
        seen.append(now)
        heapq.heappush(turns, now + pace.next(now, streams))
    late = seen[5 * streams :]
    gaps = [after - before for before, after in pairwise(late)]
    assert gaps == pytest.approx([around / streams] * len(gaps), rel=0.01)


GUIDE = "You plan journeys. " * 20
IDS = array("q", range(100))


@pytest.mark.parametrize(
    ("ranks", "streams", "beginning", "chosen"),
    [
        # Siblings share a rank. The sibling with the longest common prefix decides.
        (3, [(0, "Something else, of some length, so that it could be a sibling. " * 2),
             (2, GUIDE + "a")], GUIDE + "b", 2),
        (3, [(0, GUIDE + "aaa"), (1, GUIDE + "aab"), (2, GUIDE)], GUIDE + "aabc", 1),
        # A new beginning goes to the rank with the fewest streams.
        (3, [], GUIDE, 0),
        (3, [(0, "a"), (1, "b")], GUIDE, 2),
        (2, [(0, "You plan"), (1, "x"), (1, "y")], GUIDE, 0),
        # A rank far above the others gets no more siblings.
        (2, [(0, GUIDE)] * 15, GUIDE, 0),
        (2, [(0, GUIDE)] * 16, GUIDE, 1),
        # Tokens are compared with tokens, and text with text.
        (2, [(0, GUIDE), (1, IDS)], [*range(90), 7], 1),
        (2, [(0, array("q", range(9000))), (1, IDS)], list(range(9000)), 0),
        (2, [(0, GUIDE), (0, IDS)], GUIDE[:80], 0),
    ],
)  # fmt: skip
def test_a_stream_goes_to_the_rank_of_its_siblings(
    ranks: int, streams: list[tuple[int, Any]], beginning: Any, chosen: int
) -> None:
    assert choose_rank(ranks, streams, beginning) == chosen


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=200)), max_size=20),
    st.text("ab", max_size=200),
)
def test_the_choice_is_always_a_rank(streams: list[tuple[int, str]], beginning: str) -> None:
    assert choose_rank(4, streams, beginning) in range(4)
