"""Serve OpenAI's API so that answers fail in chosen ways, over real sockets."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import anyio
from anyio.abc import SocketAttribute, SocketStream

# What happens to a request. It is answered ("slow": with pauses between the words, "other": with
# another text); half-way its connection is lost ("cut"), or its answer ends, hangs or becomes an
# error; or it is refused, with a status or with HTML.
Fate = Literal[
    "fine", "slow", "other", "no done", "cut", "ends", "hang", "error", 500, 429, 401, 404, "html"
]  # fmt: skip
WORDS = ["The ", "quick ", "brown\u2028", "fox ", "jumps."]
TEXT = "".join(WORDS)
OTHER = ["A ", "lazy ", "dog."]
# The path of a channel. Engines with the plugin report the text of calls there.
CHANNEL = "/flashmoa/calls"
BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
_USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3, "streamed_tokens": 2, "late_tokens": 4},
    "prompt_stream": {"id": "s", "status": "hit"},
}


class FaultyEngine:
    """A server with a fate for each request, in order; all further requests are answered.

    Attributes:
        bodies: the bodies of the requests so far, and `contents` the same as bytes.
    """

    def __init__(self, url: str, fates: Sequence[Fate]) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.contents: list[bytes] = []
        self._fates = list(fates)

    async def serve(self, client: SocketStream) -> None:
        async with client:
            with suppress(*BROKEN):
                request = await receive(client)
                if request.method == "GET":  # It has no fate, and the engine no plugin.
                    await send(client, 404, {"detail": "Not Found"})
                    return
                self.bodies.append(request.body)
                self.contents.append(request.content)
                fate: Fate = self._fates.pop(0) if self._fates else "fine"
                await self._answer(client, fate, bool(request.body.get("stream")))

    async def _answer(self, client: SocketStream, fate: Fate, is_streamed: bool) -> None:
        if isinstance(fate, int):
            retry = b"Retry-After-Ms: 40\r\n" if fate == 429 else b""
            await send(client, fate, _ERROR | {"code": fate}, retry)
        elif fate == "html":
            await client.send(_head(200, b"text/html", b"Content-Length: 4\r\n") + b"html")
        elif is_streamed:
            await stream(client, fate)
        elif fate in ("cut", "ends"):
            await client.send(
                _head(200, b"application/json", b"Content-Length: 999\r\n") + b'{"id"'
            )
        elif fate == "error":
            await send(client, 503, _ERROR | {"code": 503})
        else:
            if fate in ("hang", "slow"):
                await anyio.sleep(30 if fate == "hang" else _SLOW * len(WORDS))
            await send(client, 200, completion(OTHER if fate == "other" else WORDS))


# Pause before each word, in seconds.
_SLOW = 0.15
_ERROR = {"object": "error", "message": "busy", "type": "Busy", "param": None}
_REASONS = {200: b"OK"}


def _head(status: int, kind: bytes, more: bytes) -> bytes:
    line = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"No"))
    fields = b"Content-Type: %s\r\nX-Request-Id: r1\r\nConnection: close\r\n" % kind
    return line + fields + more + b"\r\n"


@dataclass(frozen=True)
class Received:
    """A request; the names of its headers have lower case."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.content or b"{}")


async def receive(client: SocketStream) -> Received:
    """Receive a request."""
    head, _, body = (await client.receive()).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in fields}
    while len(body) < int(headers.get("content-length", "0")):
        body += await client.receive()
    method, path, _ = first.split(" ")
    return Received(method, path, headers, body)


async def send(client: SocketStream, status: int, body: Any, more: bytes = b"") -> None:
    """Answer with JSON."""
    content = json.dumps(body).encode()
    length = b"Content-Length: %d\r\n" % len(content)
    await client.send(_head(status, b"application/json", length + more) + content)


def completion(words: Sequence[str]) -> dict[str, Any]:
    """Return a whole chat completion."""
    message = {"role": "assistant", "content": "".join(words), "reasoning_content": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {**_BASE, "object": "chat.completion", "choices": [choice], "usage": _USAGE}


_BASE = {"id": "c1", "created": 1, "model": "m", "metadata": {"weight_version": "default"}}


async def start_events(client: SocketStream) -> None:
    """Begin an answer that consists of events."""
    await client.send(_head(200, b"text/event-stream", b"Transfer-Encoding: chunked\r\n"))


async def start_lines(client: SocketStream) -> None:
    """Begin an answer that consists of lines of JSON."""
    await client.send(_head(200, b"application/x-ndjson", b"Transfer-Encoding: chunked\r\n"))


async def send_line(client: SocketStream, told: Any) -> None:
    """Send a line of JSON."""
    line = f"{json.dumps(told, ensure_ascii=False)}\n".encode()
    await client.send(b"%x\r\n%s\r\n" % (len(line), line))


async def stream(client: SocketStream, fate: Fate) -> None:
    """Answer with the chunks of a chat completion."""
    await start_events(client)
    words = OTHER if fate == "other" else WORDS
    await send_event(client, chunk({"role": "assistant", "content": ""}))
    for number, word in enumerate(words):
        if number == 3 and fate in ("cut", "ends", "hang", "error"):
            if fate == "hang":
                await anyio.sleep(30)
            if fate == "error":
                await send_event(client, {"error": _ERROR | {"code": 503}})
                await send_event(client, "[DONE]")
            if fate != "cut":
                await client.send(b"0\r\n\r\n")
            return
        if fate == "slow":
            await anyio.sleep(_SLOW)
        await send_event(client, chunk({"content": word}))
    await send_event(client, chunk({}, "stop"))
    await send_event(client, {**chunk({}), "choices": [], "usage": _USAGE})
    if fate != "no done":
        await send_event(client, "[DONE]")
    await client.send(b"0\r\n\r\n")


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """Return a chunk of a chat completion."""
    # SGLang's deltas always have this field.
    delta = {"reasoning_content": None, **delta}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**_BASE, "object": "chat.completion.chunk", "choices": [choice], "usage": None}


async def send_event(client: SocketStream, event: Any) -> None:
    """Send an event."""
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    # JSON can have half of a surrogate pair as an escape only.
    line = f"data: {data}\n\n".encode(errors="backslashreplace")
    await client.send(b"%x\r\n%s\r\n" % (len(line), line))


@asynccontextmanager
async def faulty_engine(*fates: Fate) -> AsyncGenerator[FaultyEngine]:
    async with listening(lambda url: FaultyEngine(url, fates)) as engine:
        yield engine


class Serving(Protocol):
    async def serve(self, client: SocketStream) -> None: ...


T = TypeVar("T", bound=Serving)


@asynccontextmanager
async def listening(make: Callable[[str], T]) -> AsyncGenerator[T]:
    """Run the server that ``make`` returns for a URL, at that URL."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        port = listener.extra(SocketAttribute.local_port)
        engine = make(f"http://127.0.0.1:{port}")
        group.start_soon(listener.serve, engine.serve)
        yield engine
        group.cancel_scope.cancel()
