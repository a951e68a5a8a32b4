"""Test that calls in a run are observed, and get the answers that they get outside of runs."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import httpx
import openai
import pytest

from flashmoa.linking.calls import CallObserver, CallResult
from flashmoa.observe import CallFailed, CallFinished, CallStarted, Event, PromptSent
from flashmoa.openai import run
from flashmoa.openai_http import PassingAnswer, advising
from flashmoa.openai_io import UntappedIO
from tests.unit.openai.fake_server import (
    TEXT,
    WORDS,
    FakeServer,
    ask,
    both_clients,
    chunk,
    chunks,
    in_pieces,
    stream,
    whole,
)

pytestmark = pytest.mark.anyio
EVENTS = {"content-type": "text/event-stream"}
MESSAGES: Any = [{"role": "user", "content": "Go."}]
TOOL = {"type": "function", "function": {"name": "look"}}


def texts(events: list[Event]) -> list[str]:
    """Return the text of each answer that was observed to its end."""
    assert not [event for event in events if isinstance(event, CallFailed)]
    return [event.text for event in events if isinstance(event, CallFinished)]


@both_clients
async def test_several_answers_are_asked_for_once_and_not_as_a_stream(server: FakeServer) -> None:
    def several(body: Mapping[str, Any]) -> httpx.Response:
        if not body.get("stream"):
            return whole()
        second = {**chunk({"content": "B"})["choices"][0], "index": 1}
        return stream([{**chunk({}), "choices": [second]}, *chunks()])

    server.chat = several
    events: list[Event] = []
    async with server.client() as client, run("several", listener=events.append):
        await ask(client, "Go.", n=2)
    assert [body.get("stream") for body in server.chats()] == [None]
    assert texts(events) == [TEXT]


@both_clients
async def test_one_answer_is_asked_for_as_a_stream(server: FakeServer) -> None:
    async with server.client() as client, run("one"):
        await ask(client, "Go.", n=1)
        await ask(client, "Go.", n=None)
    assert [body.get("stream") for body in server.chats()] == [True, True]


@both_clients
@pytest.mark.parametrize("fields", ["x", [1]])
async def test_a_prompt_that_cannot_be_reported_is_sent_all_the_same(
    server: FakeServer, fields: Any, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    async with server.client() as client, run("reports", listener=events.append):
        choice = await ask(client, "Go.", extra_body={"chat_template_kwargs": fields})
    assert choice.message.content == TEXT and texts(events) == [TEXT]
    reports = [record for record in caplog.records if record.name.startswith("flashmoa.openai")]
    assert len(reports) == 1 and "could not be reported" in reports[0].message


@both_clients
async def test_a_servers_own_fields_of_a_choice_are_the_same_in_a_run(server: FakeServer) -> None:
    def answer(body: Mapping[str, Any]) -> httpx.Response:
        if not body.get("stream"):
            return whole(matched_stop=7, token_ids=[1, 2, 3], other=None, early="a")
        return stream(
            [
                chunk({"content": TEXT}, matched_stop=None, token_ids=[1], other=None, early="a"),
                chunk({}, matched_stop=None, token_ids=[2, 3]),
                chunk({}, "stop", matched_stop=7, token_ids=None, early=None),
            ]
        )

    server.chat = answer
    async with server.client() as client:
        outside = await ask(client, "Go.")
        async with run("fields"):
            inside = await ask(client, "Go.")
    assert outside.model_extra["matched_stop"] == 7
    assert inside.model_extra == outside.model_extra


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
    events: list[Event] = []
    async with server.client() as client, run("compressed", listener=events.append):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        pieces = [event.choices[0].delta.content or "" async for event in answer]
    assert [piece for piece in pieces if piece] == WORDS and texts(events) == [TEXT]


@both_clients
@pytest.mark.parametrize("coding", [None, "gzip"])
async def test_a_document_that_is_read_in_pieces_is_observed(
    server: FakeServer, coding: str | None
) -> None:
    kind, body = "application/json", whole().content
    halves = [body[:40], body[40:]]
    server.chat = lambda _: compressed(body, coding, kind) if coding else in_pieces(halves, kind)
    events: list[Event] = []
    async with server.client() as client, run("document", listener=events.append):
        create = client.chat.completions.with_streaming_response.create
        async with create(model="m", messages=MESSAGES) as response:
            answer: Any = await response.parse()
    assert answer.choices[0].message.content == TEXT and texts(events) == [TEXT]


@both_clients
async def test_a_document_that_is_not_read_to_its_end_is_no_answer(server: FakeServer) -> None:
    body = whole().content
    server.chat = lambda _: in_pieces([body[:40], body[40:]], "application/json")
    events: list[Event] = []
    async with server.client() as client, run("left", listener=events.append):
        create = client.chat.completions.with_streaming_response.create
        async with create(model="m", messages=MESSAGES) as response:
            async for _ in response.iter_bytes():
                break
    (failed,) = [event for event in events if isinstance(event, CallFailed)]
    assert "not read to its end" in failed.error


@both_clients
async def test_an_answer_in_a_wrong_encoding_fails_as_outside_of_runs(server: FakeServer) -> None:
    server.chat = lambda _: in_pieces([b"no", b" gzip"], **{"content-encoding": "gzip"})
    events: list[Event] = []
    found: list[type[Exception]] = []
    async with server.client() as client:

        async def call() -> None:
            with pytest.raises((httpx.DecodingError, openai.APIError)) as raised:
                async for _ in await client.chat.completions.create(
                    model="m", messages=MESSAGES, stream=True
                ):
                    pass
            found.append(raised.type)

        await call()
        async with run("wrong", listener=events.append):
            await call()
    assert found[0] is found[1]
    assert [type(event) for event in events].count(CallFailed) == 1


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
    events: list[Event] = []
    async with server.client() as client, run("refused", listener=events.append):
        with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
            await client.chat.completions.create(model="m", messages=MESSAGES, **asked)
    (failed,) = [event for event in events if isinstance(event, CallFailed)]
    assert failed.error_type == "MalformedRequest" and "the prompt is too long" in failed.error


@both_clients
async def test_a_compressed_refusal_is_reported_with_its_message(server: FakeServer) -> None:
    body = gzip.compress(b"Not yet.")
    server.chat = lambda _: refusal(503, body, **{"content-encoding": "gzip"})
    events: list[Event] = []
    async with server.client() as client, run("refused", listener=events.append):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    (failed,) = [event for event in events if isinstance(event, CallFailed)]
    assert failed.error_type == "EngineDraining" and "Not yet." in failed.error


@both_clients
@pytest.mark.parametrize("status", [200, 400])
async def test_a_document_that_is_nested_too_deeply_fails_as_outside_of_runs(
    server: FakeServer, status: int
) -> None:
    server.chat = lambda _: refusal(status, b"[" * 100_000)
    found: list[type[Exception]] = []
    async with server.client() as client:

        async def call() -> None:
            with pytest.raises((RecursionError, openai.APIError)) as raised:
                await ask(client, "Go.")
            found.append(raised.type)

        await call()
        async with run("deep"):
            await call()
    assert found[0] is found[1] is (RecursionError if status == 200 else openai.BadRequestError)


@pytest.mark.parametrize("end", ["ends", "hangs", "breaks"])
async def test_a_stream_is_read_to_its_end_but_its_answer_does_not_depend_on_that(
    server: FakeServer, end: str
) -> None:
    """A connection whose response was not read to its end is not used again."""
    data, ended = stream(chunks()), list[bool]()

    class WithEnd(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield await data.aread()
            if end == "hangs":
                await anyio.sleep_forever()
            if end == "breaks":
                raise httpx.ReadError("")
            ended.append(True)

    server.chat = lambda _: httpx.Response(200, headers=EVENTS, stream=WithEnd())
    async with server.client() as client, run("ends"):
        assert (await ask(client, "Go.")).message.content == TEXT
    assert ended == [True] * (end == "ends") and len(server.chats()) == 1


async def test_a_stream_that_a_hook_has_read_is_observed(server: FakeServer) -> None:
    async def read(response: httpx.Response) -> None:
        await response.aread()

    events: list[Event] = []
    http = httpx.AsyncClient(event_hooks={"response": [read]})
    async with server.client(http_client=http) as client, run("hook", listener=events.append):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert "".join([event.choices[0].delta.content or "" async for event in answer]) == TEXT
        assert texts(events) == [TEXT]


@both_clients
async def test_no_first_token_is_reported_of_an_answer_that_comes_as_a_whole(
    server: FakeServer,
) -> None:
    """Answers of agents with tools do."""
    events: list[Event] = []
    async with server.client() as client, run("tools", listener=events.append):
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
    return UntappedIO(httpx.AsyncClient()).watch(response, answer)


class Unending(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield f"data: {json.dumps(chunks()[0])}\n\n".encode()
        await anyio.sleep_forever()


async def test_an_answer_whose_reader_is_cancelled_has_failed() -> None:
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
async def test_each_piece_of_text_is_observed_before_its_bytes_pass(library: str) -> None:
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
def test_an_engine_that_is_out_of_reach_is_named_with_either_library(library: str) -> None:
    http = pytest.importorskip(library)
    request = http.Request("POST", "http://engine/v1/chat/completions")
    with pytest.raises(openai.APIConnectionError) as raised, advising("http://engine"):
        raise openai.APIConnectionError(request=request) from http.ConnectError("refused")
    assert "http://engine cannot be reached" in raised.value.__notes__[0]
