"""Test reading streamed answers as an engine sends them."""

from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import EngineClient
from flashmoa.engine import generation
from flashmoa.errors import BadAnswer, RequestRefused
from tests.unit.engine.faulty_engine import TEXT, faulty_engine


async def test_only_line_feeds_end_the_lines_of_events() -> None:
    """U+2028 ends a line for Python, but not in an event."""
    async with (
        faulty_engine() as engine,
        EngineClient(engine.url) as client,
        client.chat([{"role": "user", "content": "Go."}]) as deltas,
    ):
        assert "".join([delta.text async for delta in deltas]) == TEXT


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        ("data: a\n\ndata:b\n\n", ["a", "b"]),
        ("data: a\n\ndata: b\n\ndata: c \n\ndata: \n\n", ["a", "b", "c"]),
        ("data: a\n\ndata: b\ndata: c\n\ndata: d\nid: 1\n\ndata: e\n\n", ["a", "b\nc", "d", "e"]),
        ("\ufeffdata: a\n\n\ufeffdata: b\n\n", ["a"]),
        ("data: a\ndata: b\n\n", ["a\nb"]),
        ("data:\n\ndata\n\n: ping\n\ndata: \n\n\n", []),
        ("event: message\nid: 7\nretry: 9\ndata: a\n\n", ["a"]),
        ("data: a: b\u2028\n\ndatas: c\n\n", ["a: b\u2028"]),
        ("data: a\n", ["a"]),
        ("data: a\n\ndata: {cut", ["a"]),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@given(data=st.data())
def test_events_are_read_however_they_are_cut(
    stream: str, events: list[str], end: str, data: st.DataObject
) -> None:
    sent = stream.replace("\n", end).encode()
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=9))
    reader = generation.EventReader()
    pieces = [sent[a:b] for a, b in pairwise(sorted([0, *cuts, len(sent)]))]
    found = [x for piece in pieces for x in reader.feed(piece)] + reader.end()
    assert [event.decode() for event in found] == events


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_a_long_line_is_searched_once(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        searched = 0

        def split(self, data: bytes) -> list[bytes]:
            self.searched += len(data)
            return line_end.split(data)

    line_end, counting = generation._LINE_END, Counting()
    monkeypatch.setattr(generation, "_LINE_END", counting)
    reader, data = generation.EventReader(), b"data: " + b"A" * 100_000 + end
    pieces = [data[place : place + 100] for place in range(0, len(data), 100)]
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.end()
    assert events == [b"A" * 100_000]
    assert counting.searched < 3 * len(data)


PARTS: list[Any] = [{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]


async def items(*chunks: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize(
    ("choices", "text", "reasoning"),
    [
        (None, "", ""),
        ([None], "", ""),
        ([{"delta": None}], "", ""),
        ([{"index": 0}], "", ""),
        ([{"delta": {"content": None}}], "", ""),
        ([{"delta": {"content": PARTS}}], "ab", ""),
        # Engines may write half of a surrogate pair, but no request or answer can contain it.
        ([{"delta": {"content": "a\ud83db", "reasoning": "\ud83d"}}], "a\ufffdb", "\ufffd"),
        ([{"delta": {"content": "a\U0001f600b"}}], "a\U0001f600b", ""),
    ],
)
async def test_any_chunk_of_a_chat_has_a_text(choices: Any, text: str, reasoning: str) -> None:
    chunks = items({"choices": choices, "usage": None}, {})
    first, last = [delta async for delta in generation.read_chat(chunks)]
    assert (first.text, first.reasoning, last.text) == (text, reasoning, "")


async def test_half_a_surrogate_pair_is_replaced() -> None:
    empty = {"output_ids": [], "meta_info": {}}
    outputs = items({"text": "a\ud83d", **empty}, {"text": "a\ud83db", **empty})
    assert [delta.text async for delta in generation.read_generation(outputs)] == ["a\ufffd", "b"]


async def events_of(event: str) -> list[dict[str, Any]]:
    response = httpx.Response(200, text=f"data: {event}\n\n")
    return [found async for found in generation.read_events(response)]


@pytest.mark.parametrize(
    ("event", "status", "text"),
    [
        ('{"error": {"message": "too long", "code": "context_length_exceeded"}}', 400, "too long"),
        ('{"error": {"message": "busy", "code": 503}}', 503, "busy"),
        ('{"error": {"message": "bad", "type": "invalid_request_error"}}', 400, "bad"),
        # An engine that has begun to answer had no fault to find with the request.
        ('{"error": "out of memory"}', 500, "out of memory"),
        ('{"error": {"message": "lost", "type": "server_error", "code": null}}', 500, "lost"),
    ],
)
async def test_an_error_in_a_stream_has_many_forms(event: str, status: int, text: str) -> None:
    with pytest.raises(RequestRefused, match=text) as refused:
        await events_of(event)
    assert refused.value.status == status


async def test_an_event_without_an_error_may_say_so() -> None:
    """Some servers have the field in every event."""
    found = await events_of('{"error": null, "choices": []}')
    assert found == [{"error": None, "choices": []}]


@pytest.mark.parametrize("event", ["[1]", "null", '"text"', "3"])
async def test_an_event_that_is_no_object_is_bad(event: str) -> None:
    with pytest.raises(BadAnswer, match="not a JSON object"):
        await events_of(event)


@pytest.mark.parametrize(
    "event", ['{"choices": [{"delta": "text"}]}', '{"usage": {"prompt_tokens": "x"}}', "broken"]
)
async def test_a_chat_of_another_form_is_a_bad_answer(event: str) -> None:
    headers = {"content-type": "text/event-stream"}
    if event == "broken":
        headers["content-encoding"] = "gzip"
    content = httpx.ByteStream(f"data: {event}\n\n".encode())
    sent = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=content))
    async with EngineClient("http://engine") as client:
        client._http = httpx.AsyncClient(base_url="http://engine", transport=sent)
        with pytest.raises(BadAnswer, match="http://engine/v1/chat/completions"):
            async with client.chat([]) as deltas:
                [delta async for delta in deltas]


async def test_the_steps_of_a_chat_end_with_it() -> None:
    async with faulty_engine() as engine, EngineClient(engine.url) as client:
        async with client.chat([{"role": "user", "content": "Go."}]) as deltas:
            await anext(deltas)
        assert await anext(deltas, None) is None


def call(id: str, name: str, arguments: str, kind: str = "function") -> dict[str, Any]:
    text = "input" if kind == "custom" else "arguments"
    return {"id": id, "type": kind, kind: {"name": name, text: arguments}}


LOOK, WALK = call("a", "look", '{"at": "it"}'), call("b", "walk", "{}")
# Pieces of calls, and the calls.
CALLS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([LOOK, WALK], [LOOK, WALK]),
    ([{**LOOK, "index": 0}, {**WALK, "index": None}], [LOOK, WALK]),
    ([call("a", "look", '{"at"'), call("", "", ': "it"}'), WALK], [LOOK, WALK]),
    ([call("a", "look", '{"at"'), call("a", "look", ': "it"}')], [LOOK]),
    ([{**WALK, "index": 3_000_000}, {**LOOK, "index": 1}], [LOOK, WALK]),
    ([{**call("a", "look", "x", "custom"), "index": 0}, {"index": 0, "custom": {"input": "y"}}],
     [call("a", "look", "xy", "custom")]),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "calls"), CALLS)
def test_pieces_of_tool_calls_add_up_to_the_calls(
    pieces: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> None:
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        generation.add_tool_calls(found, [piece])
    assert [found[place] for place in sorted(found)] == calls
