"""Test that calls in a run are observed, and get the answers that they get outside of runs."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import httpx
import openai
import pytest

from flashmoa.engine.wire import CALL_HEADER
from flashmoa.link.calls import CallObserver, CallResult
from flashmoa.observe import CallFailed, CallFinished, CallStarted, Event, PromptSent
from flashmoa.openai import run
from flashmoa.openai.http import PassingAnswer, advising
from flashmoa.openai.io import ObservedIO
from tests.unit.openai.fake_server import (
    MESSAGES,
    TEXT,
    WORDS,
    FakeServer,
    ask,
    both_clients,
    chunks,
    in_pieces,
    observed,
    read,
    whole,
)

EVENTS = {"content-type": "text/event-stream"}
TOOL = {"type": "function", "function": {"name": "look"}}


def texts(events: list[Event]) -> list[str]:
    """Return the text of each answer that was observed to its end."""
    assert not [event for event in events if isinstance(event, CallFailed)]
    return [event.text for event in events if isinstance(event, CallFinished)]


def failure(events: list[Event]) -> CallFailed:
    """Return the only failure."""
    (failed,) = [event for event in events if isinstance(event, CallFailed)]
    return failed


def streaming(client: Any) -> Any:
    """Ask for an answer whose body is read by hand."""
    create = client.chat.completions.with_streaming_response.create
    return create(model="m", messages=MESSAGES)


@both_clients
async def test_several_answers_are_not_heard(server: FakeServer) -> None:
    async with observed(server, "several") as (client, events):
        for number in (2, 1, None):
            await ask(client, "Go.", n=number)
    sent = [headers for path, _, headers in server.requests if path.endswith("/completions")]
    assert [CALL_HEADER in headers for headers in sent] == [False, True, True]
    assert texts(events) == [TEXT] * 3


@both_clients
async def test_streams_are_read_as_they_pass_on_no_channel(server: FakeServer) -> None:
    async with observed(server, "streams") as (client, events):
        assert await read(client) == WORDS
    ((_, _, headers),) = server.requests
    call = headers[CALL_HEADER].replace("-", "")
    assert not any(call.startswith(channel) for channel, _ in server.channels)
    assert texts(events) == [TEXT]


@both_clients
@pytest.mark.parametrize("fields", ["x", [1]])
async def test_a_prompt_that_cannot_be_reported_is_sent(
    server: FakeServer, fields: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with observed(server, "reports") as (client, events):
        choice = await ask(client, "Go.", extra_body={"chat_template_kwargs": fields})
    assert choice.message.content == TEXT and texts(events) == [TEXT]
    reports = [record for record in caplog.records if record.name.startswith("flashmoa.openai")]
    assert len(reports) == 1 and "could not be reported" in reports[0].message


def compressed(body: bytes, coding: str, kind: str) -> httpx.Response:
    """Answer with a body that is compressed, each byte a piece."""
    data = gzip.compress(body) if coding == "gzip" else zlib.compress(body)
    pieces = [data[place : place + 1] for place in range(len(data))]
    return in_pieces(pieces, kind, **{"content-encoding": coding})


@both_clients
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_stream_is_observed(server: FakeServer, coding: str) -> None:
    lines = [f"data: {json.dumps(event)}\n\n" for event in chunks()]
    body = "".join([*lines, "data: [DONE]\n\n"]).encode()
    server.chat = lambda _: compressed(body, coding, "text/event-stream")
    async with observed(server, "compressed") as (client, events):
        assert await read(client) == WORDS
    assert texts(events) == [TEXT]


@both_clients
@pytest.mark.parametrize("coding", [None, "gzip"])
async def test_a_document_that_is_read_in_pieces_is_observed(
    server: FakeServer, coding: str | None
) -> None:
    kind, body = "application/json", whole().content
    halves = [body[:40], body[40:]]
    server.chat = lambda _: compressed(body, coding, kind) if coding else in_pieces(halves, kind)
    async with observed(server, "document") as (client, events), streaming(client) as response:
        answer: Any = await response.parse()
    assert answer.choices[0].message.content == TEXT and texts(events) == [TEXT]


@both_clients
async def test_a_document_that_is_not_read_whole_is_no_answer(server: FakeServer) -> None:
    body = whole().content
    server.chat = lambda _: in_pieces([body[:40], body[40:]], "application/json")
    async with observed(server, "left") as (client, events), streaming(client) as response:
        async for _ in response.iter_bytes():
            break
    assert "not read to its end" in failure(events).error


NESTED = b"[" * 100_000
GZIP = {"content-encoding": "gzip"}


@both_clients
@pytest.mark.parametrize(
    ("answer", "error", "is_stream"),
    [
        (
            lambda: in_pieces([b"no", b" gzip"], **GZIP),
            (httpx.DecodingError, openai.APIError),
            True,
        ),
        (lambda: refusal(200, NESTED), RecursionError, False),
        (lambda: refusal(400, NESTED), openai.BadRequestError, False),
    ],
    ids=["encoding", "nesting", "nested refusal"],
)
async def test_an_odd_answer_fails_as_outside_of_runs(
    server: FakeServer, answer: Callable[[], httpx.Response], error: Any, is_stream: bool
) -> None:
    server.chat = lambda _: answer()
    found: list[type[Exception]] = []

    async def call(client: Any) -> None:
        with pytest.raises(error) as raised:
            await (read(client) if is_stream else ask(client, "Go."))
        found.append(raised.type)

    async with server.client() as client:
        await call(client)
    async with observed(server, "odd") as (client, events):
        await call(client)
    assert found[0] is found[1]
    assert failure(events)


def refusal(status: int, body: bytes, **headers: str) -> httpx.Response:
    answer = in_pieces([body], "application/json", **headers)
    answer.status_code = status
    return answer


@both_clients
@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"tools": [TOOL]}])
@pytest.mark.parametrize("is_wrapped", [True, False])
async def test_a_refusal_is_reported_with_its_message(
    server: FakeServer, asked: dict[str, Any], is_wrapped: bool
) -> None:
    problem = {"object": "error", "message": "the prompt is too long", "code": 400}
    body = {"error": problem} if is_wrapped else problem
    server.chat = lambda _: refusal(400, json.dumps(body).encode())
    async with observed(server, "refused") as (client, events):
        with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
            await client.chat.completions.create(model="m", messages=MESSAGES, **asked)
    failed = failure(events)
    assert failed.error_type == "MalformedRequest" and "the prompt is too long" in failed.error


@both_clients
async def test_a_compressed_refusal_is_reported(server: FakeServer) -> None:
    body = gzip.compress(b"Not yet.")
    server.chat = lambda _: refusal(503, body, **GZIP)
    async with observed(server, "refused") as (client, events):
        with pytest.raises(openai.InternalServerError):
            await read(client)
    failed = failure(events)
    assert failed.error_type == "EngineDraining" and "Not yet." in failed.error


@both_clients
async def test_an_answer_is_complete_after_its_last_event(server: FakeServer) -> None:
    """Whatever its connection does then."""
    events: list[Event] = []

    def breaking() -> Iterator[bytes]:
        yield b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in chunks())
        yield b"data: [DONE]\n\n"
        assert texts(events) == [TEXT]
        raise httpx.ReadError("")

    server.chat = lambda _: in_pieces(breaking())
    async with server.client() as client, run("ends", listener=events.append):
        with suppress(httpx.ReadError, openai.APIError):
            await read(client)
    assert texts(events) == [TEXT]


async def test_a_stream_that_a_hook_has_read_is_observed(server: FakeServer) -> None:
    async def read_whole(response: httpx.Response) -> None:
        await response.aread()

    http = httpx.AsyncClient(event_hooks={"response": [read_whole]})
    async with observed(server, "hook", http_client=http) as (client, events):
        assert await read(client) == WORDS
        assert texts(events) == [TEXT]


@both_clients
async def test_a_whole_answer_has_no_first_token(server: FakeServer) -> None:
    async with observed(server, "tools") as (client, events):
        await ask(client, "Go.", tools=[TOOL])
    assert [type(event) for event in events] == [CallStarted, PromptSent, CallFinished]
    assert texts(events) == [TEXT]


class Recorder(CallObserver):
    def __init__(self) -> None:
        self.found: list[str | CallResult | BaseException] = []

    def on_text(self, text: str) -> None:
        self.found.append(text)

    def on_finish(self, result: CallResult) -> None:
        self.found.append(result)

    def on_failure(self, error: BaseException) -> None:
        self.found.append(error)


def watch(response: Any, recorder: Recorder) -> Any:
    answer = PassingAnswer(response, recorder, recorder.on_text)
    return ObservedIO(httpx.AsyncClient()).watch(response, answer)


class Unending(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield f"data: {json.dumps(chunks()[0])}\n\n".encode()
        await anyio.sleep_forever()


async def test_an_answer_with_a_cancelled_reader_has_failed() -> None:
    """Nobody may close the response afterwards."""
    response, recorder = httpx.Response(200, headers=EVENTS, stream=Unending()), Recorder()
    response.stream = watch(response, recorder)
    with anyio.CancelScope() as scope:
        async for _ in response.aiter_bytes():
            scope.cancel()
    assert len(recorder.found) == 2 and isinstance(
        recorder.found[1], anyio.get_cancelled_exc_class()
    )


async def test_an_answer_whose_reader_leaves_has_ended() -> None:
    response, recorder = httpx.Response(200, headers=EVENTS, stream=Unending()), Recorder()
    pieces = aiter(watch(response, recorder))
    await anext(pieces)
    await pieces.aclose()
    assert recorder.found[0] == WORDS[0] and len(recorder.found) == 2


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_text_is_observed_before_its_bytes_pass(library: str) -> None:
    """The decoders of the two libraries differ."""
    http = pytest.importorskip(library)
    encoder = zlib.compressobj(wbits=31)
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in chunks()[: len(WORDS)]]
    pieces = [encoder.compress(line) + encoder.flush(zlib.Z_SYNC_FLUSH) for line in lines]

    class Pieces(http.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    response, recorder = http.Response(200, headers=headers, stream=Pieces()), Recorder()
    response.stream = watch(response, recorder)
    passed = 0
    async for _ in response.aiter_bytes():
        passed += 1
        assert recorder.found == WORDS[:passed]
    assert passed == len(WORDS)
    await response.aclose()
    assert isinstance(recorder.found[-1], RuntimeError)


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_an_unreachable_engine_is_named(library: str) -> None:
    http = pytest.importorskip(library)
    request = http.Request("POST", "http://engine/v1/chat/completions")
    with pytest.raises(openai.APIConnectionError) as raised, advising("http://engine"):
        raise openai.APIConnectionError(request=request) from http.ConnectError("refused")
    assert "http://engine cannot be reached" in raised.value.__notes__[0]
