"""Test that unusual requests, and those of unusual clients, are answered as outside of runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from flashmoa import openai_http
from flashmoa.linking.calls import CallObserver
from flashmoa.openai_http import observe_completions
from tests.unit.openai.fake_server import FakeServer, chunks, in_pieces, stream, whole

pytestmark = pytest.mark.anyio
URL = "http://engine:30000/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": []}


class Linked(CallObserver):
    prompt_stream_id = "s"


@pytest.fixture
def send(server: FakeServer) -> Callable[..., Any]:
    """Return a function that sends a request in a run, given arguments of it and its client."""

    async def send(hooks: Any = None, **request: Any) -> httpx.Response:
        async with httpx.AsyncClient(event_hooks=hooks, timeout=9.0) as http:
            observe_completions(http, lambda: lambda _request, _body: Linked())
            fields: dict[str, Any] = {"json": BODY, **request}
            return await http.send(http.build_request("POST", URL, **fields))

    return send


async def test_a_request_with_an_idempotency_key_is_sent_once_as_it_is(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    """A server may repeat its first answer to the key, or refuse another body with it."""
    await send(headers={"Idempotency-Key": "k"})
    assert server.chats() == [BODY]


async def test_a_client_whose_hooks_read_responses_gets_them_whole(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    async def read(response: httpx.Response) -> None:
        await response.aread()
        seen.append(response.json()["object"])

    seen: list[str] = []
    await send({"response": [read]})
    assert seen == ["chat.completion"]


async def test_half_of_a_surrogate_pair_is_sent_as_an_escape(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    odd = {**BODY, "user": "\ud83d"}
    await send(json=None, content=json.dumps(odd).encode())
    (sent,) = server.chats()
    assert sent["user"] == odd["user"] and sent["stream"]


async def test_a_body_that_is_read_as_it_is_sent_passes_as_it_is(
    server: FakeServer, send: Callable[..., Any]
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(BODY).encode()

    await send(json=None, content=pieces())
    assert server.chats() == [BODY]


@pytest.mark.parametrize("status", [400, 200])
async def test_the_forms_of_a_request_have_one_timeout_in_all(
    status: int, monkeypatch: pytest.MonkeyPatch, send: Callable[..., Any]
) -> None:
    left: list[float] = []

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        left.append(request.extensions["timeout"]["read"])
        if len(left) > 1:
            return whole()
        return stream([]) if status == 200 else httpx.Response(status)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    response = await send()
    assert response.json()["choices"]
    assert 0 < left[1] < left[0] == 9.0


async def test_a_stream_that_took_all_the_time_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, send: Callable[..., Any]
) -> None:
    asked: list[tuple[bool, float]] = []

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        is_stream = "stream" in json.loads(request.content)
        asked.append((is_stream, request.extensions["timeout"]["read"]))
        if len(asked) == 2:
            raise httpx.ReadTimeout("too late")
        return in_pieces(slowly()) if is_stream else whole()

    def slowly() -> Iterator[bytes]:
        nonlocal now
        now = 8.5
        yield b"data: [DONE]\n\n"

    now = 0.0
    monkeypatch.setattr(openai_http, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    with pytest.raises(httpx.ReadTimeout):
        await send()
    assert (await send()).json()["choices"]
    # Some time is always left: none would fail for certain.
    assert asked == [(True, 9.0), (False, 1.0), (False, 9.0)]


async def test_a_stream_that_the_caller_reads_keeps_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds for each piece."""
    left: list[float] = []

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        left.append(request.extensions["timeout"]["read"])
        return httpx.Response(400) if len(left) == 1 else stream(chunks())

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    async with httpx.AsyncClient(timeout=9.0) as http:
        observe_completions(http, lambda: lambda _request, _body: Linked())
        async with http.stream("POST", URL, json={**BODY, "stream": True}) as response:
            await response.aread()
    assert left == [9.0, 9.0]
