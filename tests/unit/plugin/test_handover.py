"""``Handover``: which tokens the schedulers get, and what is known of their progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from flashmoa_sglang.cpu import torchvision_ops

torchvision_ops.allow_mismatched_build()

from flashmoa_sglang.http import streams as streams_module  # noqa: E402
from flashmoa_sglang.http.stream import PromptStream  # noqa: E402
from flashmoa_sglang.http.streams import StreamTable  # noqa: E402
from flashmoa_sglang.http.token_buffer import CanonicalTokenizer, TokenBuffer  # noqa: E402
from flashmoa_sglang.messages import StreamProgress  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.unit.plugin.fake_engine import FakeEngine, open_stream  # noqa: E402
from tests.unit.plugin.test_token_buffer import grouping_digits_from_the_right  # noqa: E402

pytestmark = pytest.mark.anyio

# Appends: the stream, how many tokens, whether more come, and how far other tasks go on after it.
APPENDS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 30), st.integers(0, 7).map(bool), st.integers(0, 8)
    ),
    max_size=25,
)


@asynccontextmanager
async def open_streams(
    engine: FakeEngine, sizes: Sequence[int]
) -> AsyncGenerator[tuple[StreamTable, list[PromptStream]]]:
    table = StreamTable(engine)  # type: ignore[arg-type]
    streams = [open_stream(table, tokens=size) for size in sizes]
    try:
        yield table, streams
    finally:
        for stream in streams:
            table.close(stream, "deleted")


async def handed_over(engine: FakeEngine, streams: Sequence[PromptStream]) -> None:
    """Wait until the schedulers have been told all about these streams."""
    with anyio.fail_after(5):
        while any(  # noqa: ASYNC110 - there is no event for it
            stream.known_tokens() > len(engine.tokens_of(stream.id))
            or (stream.ended_at is not None and not stream.end_sent)
            for stream in streams
        ):
            await anyio.sleep(0.001)


@given(appends=APPENDS)
@settings(max_examples=40)
def test_each_token_is_handed_over_once_in_its_order_and_then_the_end(
    appends: list[tuple[int, int, bool, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # So that the handover is in between more often.
        patch.setattr(streams_module, "_GATHERED", 0)
        asyncio.run(append_all(appends))


async def append_all(appends: list[tuple[int, int, bool, int]]) -> None:
    engine = FakeEngine()
    async with open_streams(engine, (0, 5, 20)) as (table, streams):
        for position, (number, tokens, goes_on, others) in enumerate(appends):
            stream = streams[number]
            if stream.ended_at is None:
                piece = [1000 * position + n for n in range(tokens)]
                table.append(stream, stream.next_seq, piece, end=not goes_on)
            for _ in range(others):
                await anyio.lowlevel.checkpoint()
        await handed_over(engine, streams)
    for stream in streams:
        assert engine.tokens_of(stream.id) == [*stream.ids]
        ends = [n for n, message in enumerate(engine.handed) if stream.id in message.ended]
        assert len(ends) == (stream.ended_at is not None)
        tokens = [n for n, one in enumerate(engine.handed) if stream.id in dict_of(one.tokens)]
        assert not ends or not tokens or ends[0] >= tokens[-1]
    # Streams share messages, and none is empty.
    assert all(message.tokens or message.ended for message in engine.handed)


def dict_of(tokens: Sequence[tuple[str, bytes, bool]]) -> dict[str, bool]:
    """Return the streams of a message, and which of them grow."""
    assert len({id_ for id_, _, _ in tokens}) == len(tokens)
    return {id_: grows for id_, _, grows in tokens}


async def test_tokens_that_more_text_has_changed_are_handed_over_again() -> None:
    tokenizer = CanonicalTokenizer(grouping_digits_from_the_right())
    engine = FakeEngine()
    table = StreamTable(engine)  # type: ignore[arg-type]
    stream = PromptStream(60.0, TokenBuffer(tokenizer, add_special_tokens=False))
    table.open(stream)
    for number in range(8):
        table.append(stream, number, "1234567890123", end=number == 7)
        await handed_over(engine, [stream])
    assert any(message.kept for message in engine.handed)
    assert engine.tokens_of(stream.id) == tokenizer.encode("1234567890123" * 8)
    assert table.streamed.ahead < table.streamed.total == len(engine.tokens_of(stream.id))
    table.close(stream, "deleted")


async def test_streams_that_are_opened_together_share_a_message() -> None:
    engine = FakeEngine()
    async with open_streams(engine, [10] * 5) as (_, streams):
        await handed_over(engine, streams)
    assert len(engine.handed) == 1


async def test_a_stream_grows_from_its_first_append_on() -> None:
    engine = FakeEngine()
    async with open_streams(engine, [10]) as (table, streams):
        await handed_over(engine, streams)
        table.append(streams[0], 0, [1], end=False)
        await handed_over(engine, streams)
    assert [dict_of(one.tokens)[streams[0].id] for one in engine.handed] == [False, True]


async def test_no_end_is_handed_over_of_a_stream_whose_request_comes_at_once() -> None:
    engine = FakeEngine()
    async with open_streams(engine, [10, 10]) as (table, (used, other)):
        table.append(used, 0, [1], end=True)
        table.append(other, 0, [1], end=True)
        table.claim(used)
        await handed_over(engine, [other])
        assert not used.end_sent
        assert [id_ for message in engine.handed for id_ in message.ended] == [other.id]
        # The request was refused, so the stream goes on.
        table.unclaim(used)
        await handed_over(engine, [used])
        assert engine.tokens_of(used.id) == [*used.ids]
        assert [id_ for message in engine.handed for id_ in message.unclaimed] == [used.id]


async def test_a_stream_is_handed_over_though_one_that_has_ended_was_never_opened() -> None:
    """A scheduler in a long forward answers nothing, and the rank beside it may be idle."""
    engine = FakeEngine()
    engine.opens.clear()
    async with open_streams(engine, [10]) as (table, (first,)):
        await handed_over(engine, [first])
        table.close(first, "deleted")
        with anyio.fail_after(5):
            while engine.cancelled != [first.id]:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.001)
        second = open_stream(table, tokens=10)
        await handed_over(engine, [second])
        assert engine.tokens_of(second.id) == [*second.ids]
        table.close(second, "deleted")


async def test_progress_is_noted_in_the_streams_states() -> None:
    engine = FakeEngine()
    async with open_streams(engine, [100, 50]) as (_, (first, second)):
        await handed_over(engine, [first, second])
        assert first.state()["prefilling"]
        increments = ((first.id, 64, 64, 0.5), ("unknown", 9, 9, 0.1), (second.id, 40, 0, 0.0))
        engine.reports_progress(StreamProgress(increments))
        engine.reports_progress(StreamProgress(((first.id, 100, 30, 0.25),)))
        # What other requests have computed is no increment.
        assert (second.prefilled, second.computed, second.increments) == (40, 0, 0)
        assert (first.prefilled, first.computed, first.increments) == (100, 94, 2)
        assert [span.tokens for span in first.spans] == [64, 30] and not second.spans
        assert first.spans[0].end - first.spans[0].start == pytest.approx(0.5)
        assert not first.state()["prefilling"]
        # Its KV is evicted, and computed once more.
        engine.reports_progress(StreamProgress(((first.id, 0, 0, 0.0),)))
        assert first.state()["prefilling"] and (first.prefilled, first.computed) == (0, 0)
        engine.reports_progress(StreamProgress(((first.id, 100, 100, 0.5),)))
        assert (first.prefilled, first.computed, first.increments) == (100, 100, 3)


async def test_streams_wait_for_room_until_the_scheduler_says_otherwise() -> None:
    engine = FakeEngine()
    async with open_streams(engine, [100, 100]) as (_, (first, second)):
        engine.reports_progress(StreamProgress((), ((first.id, True),)))
        engine.reports_progress(StreamProgress(((second.id, 9, 9, 0.1),)))
        assert first.state()["waits_for_room"] and not second.state()["waits_for_room"]
        engine.reports_progress(StreamProgress((), ((first.id, False),)))
        assert not first.state()["waits_for_room"]
