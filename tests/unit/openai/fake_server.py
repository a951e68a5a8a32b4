"""Answer the requests of this process in place of a server with the plugin."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import pytest

from flashmoa.openai import AsyncOpenAI
from tests.unit.linking.hung_engine import STATE

URL = "http://engine:30000"
WORDS = ["The ", "quick ", "brown ", "fox."]
TEXT = "".join(WORDS)
_BASE = {"id": "c1", "created": 1, "model": "m"}
# Returns the answer to a chat completion, given its body.
Chat = Callable[[dict[str, Any]], httpx.Response]


class FakeServer:
    """Serves chat completions and any number of prompt streams.

    Attributes:
        requests: every request so far, as (path, body, headers).
        chat: answers chat completions.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], httpx.Headers]] = []
        self.chat: Chat = lambda body: stream(chunks()) if body.get("stream") else whole()
        self._ids = itertools.count()

    def client(self, **more: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=URL, max_retries=0, **more)

    def chats(self) -> list[dict[str, Any]]:
        """Return the bodies of the chat completions so far."""
        return [body for path, body, _ in self.requests if path.endswith("/chat/completions")]

    def answer(self, request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content or b"{}")
        path = request.url.path
        self.requests.append((path, body, request.headers))
        if path.endswith("/chat/completions"):
            return self.chat(body)
        if path == "/render":
            text = "\n".join(message["content"] for message in body["messages"])
            return httpx.Response(200, json={"text": text})
        return httpx.Response(200, json={**STATE, "next_seq": 0, "id": f"s{next(self._ids)}"})


def serve(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """Return a server that gets all requests of httpx."""
    server = FakeServer()

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return server.answer(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    return server


async def ask(client: AsyncOpenAI, content: str, **more: Any) -> Any:
    """Return the first choice of an answer."""
    messages = [{"role": "user", "content": content}]
    answer: Any = await client.chat.completions.create(model="m", messages=messages, **more)  # type: ignore[call-overload]
    return answer.choices[0]


def whole(**more: Any) -> httpx.Response:
    """Answer with a whole completion, given more fields of its choice."""
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", **more}
    return httpx.Response(200, json={**_BASE, "object": "chat.completion", "choices": [choice]})


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a chunk of a chat completion, given more fields of its choice."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
    return {**_BASE, "object": "chat.completion.chunk", "choices": [choice], "usage": None}


def chunks() -> list[dict[str, Any]]:
    return [*(chunk({"content": word}) for word in WORDS), chunk({}, "stop")]


def stream(events: Iterable[dict[str, Any]]) -> httpx.Response:
    """Answer with events."""
    lines = [json.dumps(event) for event in events]
    return in_pieces([f"data: {line}\n\n".encode() for line in [*lines, "[DONE]"]])


def in_pieces(
    pieces: Iterable[bytes], kind: str = "text/event-stream", **headers: str
) -> httpx.Response:
    """Answer with bytes that arrive in pieces."""

    class Pieces(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

    return httpx.Response(200, headers={"content-type": kind, **headers}, stream=Pieces())
