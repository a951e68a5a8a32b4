"""Answer the requests of this process in place of a server with the plugin."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest

from flashmoa._concurrency import running_loop
from flashmoa.engine.wire import CALL_HEADER
from flashmoa.link.calls import CallObserver, CallResult
from flashmoa.observe import Event
from flashmoa.openai import AsyncOpenAI, OpenAI, run
from tests.unit.engine.faulty_engine import CHANNEL
from tests.unit.link.hung_engine import STATE
from tests.waiting import until

URL = "http://engine:30000"
WORDS = ["The ", "quick ", "brown ", "fox."]
TEXT = "".join(WORDS)
MESSAGES: Any = [{"role": "user", "content": "Go."}]
_BASE = {"id": "c1", "created": 1, "model": "m"}
# Returns the answer to a chat completion with this body.
Chat = Callable[[dict[str, Any]], httpx.Response]

both_clients = pytest.mark.parametrize(
    "server", [False, True], ids=["async", "blocking"], indirect=True
)


class Channel(httpx.AsyncByteStream):
    """Sends the text of calls to a client until the client stops reading.

    Attributes:
        is_open: whether the client reads.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._pieces = asyncio.Queue[bytes | None]()
        self._told = self._read = 0

    @property
    def is_read(self) -> bool:
        """Whether the client has read all lines."""
        return self._read == self._told

    def tell(self, *lines: Mapping[str, Any]) -> None:
        """Send lines, from any thread."""
        self.send(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def send(self, piece: bytes | None) -> None:
        """Send bytes, from any thread; ``None`` breaks the channel off."""
        self._told += 1
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"listening":true}\n'
        while (piece := await self._pieces.get()) is not None:
            yield piece
            # The client asks for more.
            self._read += 1
        raise httpx.ReadError("broken off")

    async def aclose(self) -> None:
        self.is_open = False


class FakeServer:
    """Serves chat completions, the Responses API and any number of prompt streams.

    Attributes:
        requests: requests so far, as (path, body, headers), except requests for channels.
        contents: the bodies of requests for answers so far, as they came.
        told: returns the words of a whole answer. It tells the words on a channel before it gives
            the answer. ``None`` if it has no channels.
        awaits_channels: whether it waits until a call's channel is open.
        channels: the requested channels so far, with their ids.
        chat: answers chat completions.
        response: answers requests of the Responses API.
        is_blocking: whether its clients are synchronous.
    """

    def __init__(self) -> None:
        self.is_blocking = False
        self.requests: list[tuple[str, dict[str, Any], httpx.Headers]] = []
        self.contents: list[bytes] = []
        self.told: Callable[[dict[str, Any]], Iterable[str]] | None = None
        self.awaits_channels = True
        self.channels: list[tuple[str, Channel]] = []
        self.chat: Chat = lambda body: stream(chunks()) if body.get("stream") else whole()
        self.response: Chat = self.chat
        self._ids: Iterator[int] = itertools.count()

    def client(self, **more: Any) -> Any:
        """Return an asynchronous client, or a synchronous client that looks like one."""
        if self.is_blocking:
            return Blocking(self.blocking_client(**more))
        return AsyncOpenAI(base_url=URL, max_retries=0, **more)

    def blocking_client(self, **more: Any) -> OpenAI:
        return OpenAI(base_url=URL, max_retries=0, **more)

    def bodies(self, end: str = "/chat/completions") -> list[dict[str, Any]]:
        """Return the bodies of the requests so far whose paths end so."""
        return [body for path, body, _ in self.requests if path.endswith(end)]

    def headers(self, *ends: str) -> list[httpx.Headers]:
        """Return the headers of the requests so far whose paths end so, by default of chats."""
        ends = ends or ("/chat/completions",)
        return [headers for path, _, headers in self.requests if path.endswith(ends)]

    def forget(self) -> None:
        """Forget the requests so far, and the channels that are closed."""
        self.requests.clear()
        self.contents.clear()
        self.channels = [each for each in self.channels if each[1].is_open]

    def answer(self, request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content or b"{}")
        path = request.url.path
        if request.method == "GET":  # It does not describe itself.
            return httpx.Response(404)
        self.requests.append((path, body, httpx.Headers(request.headers)))
        if path.endswith(("/chat/completions", "/responses")):
            self.contents.append(request.content)
        if path.endswith("/chat/completions"):
            return self.chat(body)
        if path.endswith("/responses"):
            return self.response(body)
        if path == "/render_response":
            return httpx.Response(200, json={"text": json.dumps(body)})
        if path == "/render":
            text = "\n".join(message.get("content") or "" for message in body["messages"])
            return httpx.Response(200, json={"text": text})
        return httpx.Response(200, json={**STATE, "next_seq": 0, "id": f"s{next(self._ids)}"})

    def open_channel(self, request: httpx.Request) -> httpx.Response:
        channel = Channel()
        self.channels.append((request.headers["X-FlashMoA-Channel"], channel))
        if self.told is None:
            channel.is_open = False
            return httpx.Response(404)
        return httpx.Response(200, stream=channel)

    def channel(self, call: str) -> Channel | None:
        """Return the open channel of a call."""
        found = [each for name, each in self.channels if call.startswith(name) and each.is_open]
        return found[-1] if found else None

    def tell(self, request: httpx.Request) -> Iterator[None]:
        """Tell the text of a whole answer on its channel; yield until its client has read it."""
        call = request.headers.get(CALL_HEADER, "").replace("-", "")
        body = json.loads(request.content) if call else {}
        if self.told is None or not call or body.get("stream"):
            return
        while (channel := self.channel(call)) is None:
            if not self.awaits_channels or any(each.is_open for _, each in self.channels):
                return  # The call is named, but its client does not hear it.
            yield
        at = 0
        for word in self.told(body):
            channel.tell({"call": call, "content": word, "at": at})
            at += len(word)
        while not channel.is_read:
            yield


class Blocking:
    """Looks like an asynchronous client, but blocks the event loop."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._completions: Any = client.chat.completions
        streaming = SimpleNamespace(create=self._create_streaming)
        completions = SimpleNamespace(create=self._create, with_streaming_response=streaming)
        self.chat = SimpleNamespace(completions=completions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    async def _create(self, **asked: Any) -> Any:
        answer = self._completions.create(**asked)
        return _each(answer) if asked.get("stream") else answer

    @asynccontextmanager
    async def _create_streaming(self, **asked: Any) -> AsyncGenerator[Any]:
        async def parse() -> Any:
            return response.parse()

        with self._completions.with_streaming_response.create(**asked) as response:
            yield SimpleNamespace(parse=parse, iter_bytes=lambda: _each(response.iter_bytes()))


async def _each(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


class Recorder(CallObserver):
    """Keeps the news of a call whose prompt is in a stream.

    Args:
        failing: names of its methods that raise instead.
    """

    prompt_stream_id = "s"

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.found: list[str | CallResult | BaseException] = []
        self.on_text = self.on_finish = self.on_failure = self.found.append  # type: ignore[assignment]
        for name in failing:
            setattr(self, name, self._fail)

    def _fail(self, *_: object) -> None:
        raise ZeroDivisionError

    def pieces(self) -> list[str]:
        """Return the pieces of the text so far."""
        return [each for each in self.found if isinstance(each, str)]


def serve(monkeypatch: pytest.MonkeyPatch, *, same_ids: bool = False) -> FakeServer:
    """Return a server that gets all requests of httpx."""
    server = FakeServer()
    if same_ids:  # Pydantic keeps the last thousands of short strings that it reads.
        server._ids = itertools.repeat(0)

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        await request.aread()
        if request.url.path == CHANNEL:
            return server.open_channel(request)
        steps = server.tell(request)
        await until(lambda: next(steps, steps) is steps)
        return server.answer(request)

    def handle_blocking(_: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        request.read()
        # A channel cannot be read while its event loop is blocked.
        for _step in server.tell(request) if running_loop() is None else ():
            time.sleep(0.002)
        return server.answer(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle_blocking)
    return server


@asynccontextmanager
async def observed(
    server: FakeServer, name: str, **more: Any
) -> AsyncGenerator[tuple[Any, list[Event]]]:
    """Enter a run; yield a client and the run's events."""
    events: list[Event] = []
    async with server.client(**more) as client, run(name, listener=events.append):
        yield client, events


async def read(client: Any) -> list[str]:
    """Return the pieces of a streamed answer's text."""
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    pieces = [event.choices[0].delta.content async for event in answer]
    return [piece for piece in pieces if piece]


async def ask(client: Any, content: str, **more: Any) -> Any:
    """Return the first choice of an answer."""
    messages = [{"role": "user", "content": content}]
    answer: Any = await client.chat.completions.create(model="m", messages=messages, **more)
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


def lines_of(events: Iterable[dict[str, Any]], *, is_whole: bool = True) -> list[bytes]:
    """Return the bytes of events, if ``is_whole`` with their end."""
    lines = [*map(json.dumps, events), *(["[DONE]"] if is_whole else [])]
    return [f"data: {line}\n\n".encode() for line in lines]


def stream(events: Iterable[dict[str, Any]]) -> httpx.Response:
    """Answer with events."""
    return in_pieces(lines_of(events))


def in_pieces(
    pieces: Iterable[bytes], kind: str = "text/event-stream", http: Any = httpx, **headers: str
) -> Any:
    """Answer with bytes that arrive in pieces, by default to httpx."""

    class Pieces(http.AsyncByteStream, http.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from pieces

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

    return http.Response(200, headers={"content-type": kind, **headers}, stream=Pieces())
