"""Test that calls in a run are observed, and get the answers that they get outside of runs."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import httpx
import openai
import pytest

from flashmoa import EngineClient
from flashmoa._concurrency import TaskHost
from flashmoa.engine.wire import CALL_HEADER, STREAM_HEADER
from flashmoa.link.hearing import CallChannel
from flashmoa.observe import CallFailed, CallFinished, CallStarted, Event, PromptSent
from flashmoa.openai import run
from flashmoa.openai.http import ObservedIO, PassingAnswer, advising, observe_completions
from tests.unit.events import of_kind
from tests.unit.openai.fake_server import (
    MESSAGES,
    TEXT,
    WORDS,
    FakeServer,
    Recorder,
    ask,
    both_clients,
    chunks,
    in_pieces,
    lines_of,
    observed,
    read,
    whole,
)

EVENTS = {"content-type": "text/event-stream"}
TOOL = {"type": "function", "function": {"name": "look"}}


def texts(events: list[Event]) -> list[str]:
    """Return the text of each answer that was observed to its end."""
    assert not of_kind(events, CallFailed)
    return [event.text for event in of_kind(events, CallFinished)]


def failure(events: list[Event]) -> CallFailed:
    """Return the only failure."""
    (failed,) = of_kind(events, CallFailed)
    return failed


def streaming(client: Any, **more: Any) -> Any:
    """Ask for an answer whose body is read by hand."""
    create = client.chat.completions.with_streaming_response.create
    return create(model="m", messages=MESSAGES, **more)


@both_clients
async def test_several_answers_are_not_heard(server: FakeServer) -> None:
    async with observed(server, "several") as (client, events):
        for number in (2, 1, None):
            await ask(client, "Go.", n=number)
    assert [CALL_HEADER in headers for headers in server.headers()] == [False, True, True]
    assert texts(events) == [TEXT] * 3


@both_clients
async def test_streams_are_heard_on_no_channel(server: FakeServer) -> None:
    async with observed(server, "streams") as (client, events):
        assert await read(client) == WORDS
    ((_, _, headers),) = server.requests
    call = headers[CALL_HEADER].replace("-", "")
    assert not any(call.startswith(channel) for channel, _ in server.channels)
    assert texts(events) == [TEXT]


@both_clients
@pytest.mark.parametrize("fields", ["x", [1]])
async def test_an_unreportable_prompt_is_sent(
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
    body = b"".join(lines_of(chunks()))
    server.chat = lambda _: compressed(body, coding, "text/event-stream")
    async with observed(server, "compressed") as (client, events):
        assert await read(client) == WORDS
    assert texts(events) == [TEXT]


@both_clients
@pytest.mark.parametrize("coding", [None, "gzip"])
async def test_a_document_in_pieces_is_observed(server: FakeServer, coding: str | None) -> None:
    kind, body = "application/json", whole().content
    halves = [body[:40], body[40:]]
    server.chat = lambda _: compressed(body, coding, kind) if coding else in_pieces(halves, kind)
    async with observed(server, "document") as (client, events), streaming(client) as response:
        answer: Any = await response.parse()
    assert answer.choices[0].message.content == TEXT and texts(events) == [TEXT]


@both_clients
@pytest.mark.parametrize("asked", [{}, {"stream": True}])
async def test_an_answer_that_is_left_early_has_failed(server: FakeServer, asked: Any) -> None:
    body = whole().content
    if not asked:
        server.chat = lambda _: in_pieces([body[:40], body[40:]], "application/json")
    async with observed(server, "left") as (client, events), streaming(client, **asked) as response:
        async for _ in response.iter_bytes():
            break
    assert "not read to its end" in failure(events).error


NESTED = b"[" * 100_000
GZIP = {"content-encoding": "gzip"}


@both_clients
@pytest.mark.parametrize(
    ("answer", "error", "is_stream"),
    [
        (lambda: in_pieces([b"no", b"zip"], **GZIP), (httpx.DecodingError, openai.APIError), True),
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
async def test_an_answer_ends_with_its_last_event(server: FakeServer) -> None:
    """Whatever its connection does then."""
    events: list[Event] = []

    def breaking() -> Iterator[bytes]:
        yield b"".join(lines_of(chunks(), is_whole=False))
        yield b"data: [DONE]\n\n"
        assert texts(events) == [TEXT]
        raise httpx.ReadError("")

    server.chat = lambda _: in_pieces(breaking())
    async with server.client() as client, run("ends", listener=events.append):
        with suppress(httpx.ReadError, openai.APIError):
            await read(client)
    assert texts(events) == [TEXT]


class OwnResponse(httpx.Response): ...


class OwnTransport(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return OwnResponse(200, headers=EVENTS, stream=in_pieces(lines_of(chunks())).stream)


async def test_a_response_of_another_class_is_observed(server: FakeServer) -> None:
    http = httpx.AsyncClient(transport=OwnTransport())
    async with observed(server, "class", http_client=http) as (client, events):
        assert await read(client) == WORDS
        assert texts(events) == [TEXT]


async def test_an_answer_that_cannot_be_watched_passes(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not this one")

    monkeypatch.setattr(ObservedIO, "watch", fail)
    async with observed(server, "unwatched") as (client, events):
        assert await read(client) == WORDS
        assert len(server.bodies()) == 1
    assert "not this one" in failure(events).error
    assert caplog.text.count("An observer of a call failed") == 1


async def test_an_answer_read_by_a_hook_is_observed(server: FakeServer) -> None:
    async def read_whole(response: httpx.Response) -> None:
        seen.append(await response.aread())

    seen: list[bytes] = []
    http = httpx.AsyncClient(event_hooks={"response": [read_whole]})
    async with observed(server, "hook", http_client=http) as (client, events):
        assert await read(client) == WORDS
        assert texts(events) == [TEXT]
        await ask(client, "Go.")
    assert seen == [b"".join(lines_of(chunks())), whole().content]
    assert texts(events) == [TEXT] * 2


@both_clients
async def test_a_whole_answer_has_no_first_token(server: FakeServer) -> None:
    async with observed(server, "tools") as (client, events):
        await ask(client, "Go.", tools=[TOOL])
    assert [type(event) for event in events] == [CallStarted, PromptSent, CallFinished]
    assert texts(events) == [TEXT]


def watched(response: Any) -> tuple[Any, Recorder]:
    """Return a response that is observed while its bytes pass, and its observer."""
    recorder = Recorder()
    answer = PassingAnswer(response, recorder, recorder.on_text)
    response.stream = ObservedIO(httpx.AsyncClient()).watch(response, answer)
    return response, recorder


class Unending(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield lines_of(chunks())[0]
        await anyio.sleep_forever()


async def test_an_answer_to_a_cancelled_reader_failed() -> None:
    """Nobody may close the response afterwards."""
    response, recorder = watched(httpx.Response(200, headers=EVENTS, stream=Unending()))
    with anyio.CancelScope() as scope:
        async for _ in response.aiter_bytes():
            scope.cancel()
    _, failed = recorder.found
    assert isinstance(failed, anyio.get_cancelled_exc_class())


async def test_an_answer_whose_reader_leaves_has_ended() -> None:
    response, recorder = watched(httpx.Response(200, headers=EVENTS, stream=Unending()))
    pieces = aiter(response.stream)
    await anext(pieces)
    await pieces.aclose()
    assert recorder.found[0] == WORDS[0] and len(recorder.found) == 2


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_text_is_observed_before_its_bytes_pass(library: str) -> None:
    """The decoders of the two libraries differ."""
    http, encoder = pytest.importorskip(library), zlib.compressobj(wbits=31)
    lines = lines_of(chunks())[: len(WORDS)]
    pieces = [encoder.compress(line) + encoder.flush(zlib.Z_SYNC_FLUSH) for line in lines]
    response, recorder = watched(in_pieces(pieces, http=http, **GZIP))
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


COMPLETIONS = "http://engine:30000/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": []}
Send = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
async def send(server: FakeServer) -> AsyncIterator[Send]:
    """Return a function that sends an observed request, with one client."""

    async def send(observer: Any = None, stream: bool = False, **asked: Any) -> httpx.Response:
        observers.append(observer or Recorder())
        request = http.build_request("POST", COMPLETIONS, **{"json": BODY, **asked})
        return await http.send(request, stream=stream)

    observers: list[Recorder] = []
    async with httpx.AsyncClient(timeout=9.0) as http:
        observe_completions(http, lambda: lambda _request, _body: observers[-1])
        yield send


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({**BODY, "user": "\ud83d"}).encode(),
        b'{ "messages" : [ ],\r\n\t"model":"m", "model": "m", "temperature": 1.0e0}\n',
        b'{"messages": [], "model": "\xc3\xa9", "seed": 123456789012345678901234567890}',
        json.dumps(BODY).encode("utf-16"),
        b"\xef\xbb\xbf" + json.dumps(BODY).encode(),
        b"[1]",
        b'{"messages": 7}',
        b"not JSON",
        b"",
    ],
)
async def test_a_body_of_any_form_is_sent_as_it_is(
    monkeypatch: pytest.MonkeyPatch, send: Send, content: bytes
) -> None:
    sent = intercept(monkeypatch, [whole()])
    assert (await send(json=None, content=content)).json() == whole().json()
    assert [request.content for request in sent] == [content]


def intercept(
    monkeypatch: pytest.MonkeyPatch, answers: list[httpx.Response]
) -> list[httpx.Request]:
    """Give these answers to the next requests. Return the requests so far."""
    sent: list[httpx.Request] = []

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        await request.aread()
        sent.append(request)
        return answers[len(sent) - 1]

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    return sent


async def test_a_body_made_while_it_is_sent_passes(server: FakeServer, send: Send) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(BODY).encode()

    await send(json=None, content=pieces())
    assert server.bodies() == [BODY]


async def test_a_request_is_sent_once_with_its_timeout(
    monkeypatch: pytest.MonkeyPatch, send: Send
) -> None:
    """Also if it is refused, or its answer is empty."""
    answers = [httpx.Response(400), in_pieces(lines_of([])), whole()]
    sent = intercept(monkeypatch, answers.copy())
    assert [(await send()).status_code for _ in answers] == [400, 200, 200]
    assert [request.extensions["timeout"]["read"] for request in sent] == [9.0] * 3


async def test_headers_of_links_are_added_to_a_programs(server: FakeServer) -> None:
    """They are not sent again with the next attempt.

    An idempotency key is sent once: a server may repeat its first answer to the key, or refuse
    another body with it.
    """
    linked = Recorder()
    linked.headers = {"X-Mine": "ours", "X-Ours": "ours"}
    observers = [linked, None]
    async with httpx.AsyncClient() as http:
        observe_completions(http, lambda: lambda _request, _body: observers.pop(0))
        own = {"X-Mine": "mine", "X-Theirs": "b", "Idempotency-Key": "k"}
        request = http.build_request("POST", COMPLETIONS, json=BODY, headers=own)
        for number in (1, 2):
            await http.send(request)
            assert len(server.requests) == number
    first, second = server.headers()
    assert {name: first[name] for name in own} == own
    assert (first[STREAM_HEADER], first["X-Ours"]) == ("s", "ours")
    assert second["X-Mine"] == "mine" and server.bodies() == [BODY] * 2
    assert not {STREAM_HEADER.lower(), "x-ours"} & second.keys()


@pytest.mark.parametrize(
    ("asked", "status", "failing"),
    [
        ({}, 200, ["on_named", "on_finish"]),
        ({}, 400, ["on_named", "on_failure"]),
        ({"stream": True}, 200, ["on_text"]),
    ],
)
async def test_a_failing_observer_leaves_the_answer(
    server: FakeServer, send: Send, asked: Any, status: int, failing: list[str], caplog: Any
) -> None:
    answer = server.chat
    server.chat = lambda body: answer(body) if status == 200 else httpx.Response(400, json={})
    async with EngineClient(COMPLETIONS) as engine:
        observer = Recorder(*failing)
        observer.channel = CallChannel(engine, TaskHost("Listening failed"))
        found = await send(observer, json={**BODY, **asked}, **asked)
        content = await found.aread()
    assert found.status_code == status and server.bodies() == [{**BODY, **asked}]
    assert content == await answer(asked).aread() or status == 400
    assert caplog.text.count("An observer of a call failed") == len(failing)
