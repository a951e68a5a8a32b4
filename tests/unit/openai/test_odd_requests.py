"""Test that unusual requests and clients get the same answers as outside of runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from flashmoa import EngineClient
from flashmoa._concurrency import TaskHost
from flashmoa.engine.wire import STREAM_HEADER
from flashmoa.link.calls import CallObserver, CallResult
from flashmoa.link.hearing import CallChannel
from flashmoa.openai.http import observe_completions
from tests.unit.openai.fake_server import FakeServer, stream, whole

URL = "http://engine:30000/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": []}


class Linked(CallObserver):
    prompt_stream_id = "s"
    headers = {"X-Mine": "ours", "X-Ours": "ours"}  # noqa: RUF012


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


@pytest.fixture
def send(server: FakeServer) -> Callable[..., Any]:
    """Return a function that sends an observed request."""

    async def send(hooks: Any = None, **request: Any) -> httpx.Response:
        async with httpx.AsyncClient(event_hooks=hooks, timeout=9.0) as http:
            observe_completions(http, lambda: lambda _request, _body: Linked())
            fields: dict[str, Any] = {"json": BODY, **request}
            return await http.send(http.build_request("POST", URL, **fields))

    return send


async def test_an_idempotency_key_is_sent_once(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    """A server may repeat its first answer to the key, or refuse another body with it."""
    await send(headers={"Idempotency-Key": "k"})
    ((_, body, headers),) = server.requests
    assert body == BODY and headers["Idempotency-Key"] == "k"


async def test_hooks_that_read_responses_get_them_whole(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    async def read(response: httpx.Response) -> None:
        await response.aread()
        seen.append(response.json()["object"])

    seen: list[str] = []
    await send({"response": [read]})
    assert seen == ["chat.completion"]


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
    monkeypatch: pytest.MonkeyPatch, send: Callable[..., Any], content: bytes
) -> None:
    sent = intercept(monkeypatch, [whole()])
    assert (await send(json=None, content=content)).json() == whole().json()
    assert [request.content for request in sent] == [content]


async def test_a_body_made_while_it_is_sent_passes(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(BODY).encode()

    await send(json=None, content=pieces())
    assert server.chats() == [BODY]


async def test_a_request_is_sent_once_with_its_own_timeout(
    monkeypatch: pytest.MonkeyPatch, send: Callable[..., Any]
) -> None:
    """Also if it is refused, or answered by nothing."""
    sent = intercept(monkeypatch, [httpx.Response(400), stream([]), whole()])
    assert [(await send()).status_code for _ in range(3)] == [400, 200, 200]
    assert [request.extensions["timeout"]["read"] for request in sent] == [9.0] * 3


async def test_headers_that_a_program_sends_itself_stay(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    await send(headers={"X-Mine": "a", "X-Theirs": "b"})
    ((_, _, headers),) = server.requests
    assert [headers[name] for name in ("X-Mine", "X-Theirs", "X-Ours")] == ["a", "b", "ours"]
    assert headers[STREAM_HEADER] == "s"


async def test_headers_of_links_are_not_sent_again(
    server: FakeServer,
) -> None:
    observers: list[CallObserver | None] = [Linked(), None]
    async with httpx.AsyncClient() as http:
        observe_completions(http, lambda: lambda _request, _body: observers.pop(0))
        request = http.build_request("POST", URL, json=BODY, headers={"X-Mine": "mine"})
        for _ in range(2):
            await http.send(request)
    first, second = (headers for _, _, headers in server.requests)
    assert (first[STREAM_HEADER], first["X-Mine"], first["X-Ours"]) == ("s", "mine", "ours")
    assert second["X-Mine"] == "mine"
    assert not {STREAM_HEADER.lower(), "x-ours"} & second.keys()


class Broken(CallObserver):
    """Fails whatever it is told, but the request and the text."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__()
        self.channel = CallChannel(engine, TaskHost("Listening failed"))

    def on_named(self, call_id: str) -> None:
        raise ZeroDivisionError

    def on_finish(self, result: CallResult) -> None:
        raise ZeroDivisionError

    def on_failure(self, error: BaseException) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("status", [200, 400])
async def test_a_failing_observer_leaves_the_answer(
    server: FakeServer, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = lambda _: whole() if status == 200 else httpx.Response(status, json={})
    async with httpx.AsyncClient() as http, EngineClient(URL) as engine:
        observe_completions(http, lambda: lambda _request, _body: Broken(engine))
        assert (await http.post(URL, json=BODY)).status_code == status
    assert caplog.text.count("An observer of a call failed") == 2
