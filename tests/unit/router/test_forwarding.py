"""Test connections to engines, which may break, and how answers are relayed and counted."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from starlette.requests import Request

from flashmoa.router.client_requests import ForwardedRequest, select_forwarded_headers
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.errors import EngineLost
from flashmoa.router.forwarding import Connections, RelayedStream, forward, open_connections
from flashmoa.router.metrics import PlacementObserver, RouterMetrics
from flashmoa.router.policy import PrefixAware

pytestmark = pytest.mark.anyio
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BAD = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno"
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"
CLOSE = b""
END = b"end"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n"
SILENCE = b"silence"


async def read_request(client: SocketStream) -> None:
    request = b""
    while b"\r\n\r\n" not in request:
        request += await client.receive()
    head, _, body = request.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    while found and len(body) < int(found[1]):
        body += await client.receive()


class Server:
    """Answers the requests of each connection by a script.

    ``CLOSE`` in a script closes the connection, and ``END`` also the server; what begins with
    ``STREAM`` is the last answer before a connection ends.

    Attributes:
        seen: the number of the connection over which each request arrived.
    """

    def __init__(self, *scripts: tuple[bytes, ...]) -> None:
        self._scripts = list(scripts)
        self.seen: list[int] = []
        self.is_asked = anyio.Event()
        self._opened = 0

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as group,
        ):
            self._listener = listener
            group.start_soon(self._serve)
            yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
            group.cancel_scope.cancel()

    async def _serve(self) -> None:
        try:
            await self._listener.serve(self._answer)
        except* anyio.ClosedResourceError:
            pass

    async def _answer(self, client: SocketStream) -> None:
        number, self._opened = self._opened, self._opened + 1
        async with client:
            for answer in self._scripts[number]:
                await read_request(client)
                self.seen.append(number)
                self.is_asked.set()
                if answer is END:
                    await self._listener.aclose()
                if answer in (CLOSE, END):
                    return
                if answer is SILENCE:
                    break
                await client.send(answer)
                if answer is HALF or answer.startswith(STREAM):
                    return
            # The connection stays open until the client closes it.
            with pytest.raises(anyio.EndOfStream):
                await client.receive()


async def send(http: Connections, url: str, *, repeats: bool = True) -> bytes | None:
    answer, content = await http.exchange("POST", url, {}, b"body", repeats=repeats)
    answer.close()
    return content


@pytest.mark.parametrize("script", [(CLOSE,), (HALF,), (GOOD, CLOSE), (GOOD, HALF), (BAD, CLOSE)])
async def test_lost_request_that_may_be_repeated_is_sent_once_more_over_a_new_connection(
    script: tuple[bytes, ...],
) -> None:
    """After a 500, SGLang closes the connection without saying so in the answer."""
    server = Server(script, (GOOD,), (CLOSE,), (CLOSE,))
    async with server.listening() as url, open_connections() as http:
        for _ in script[1:]:
            await send(http, url)  # Connections are kept.
        assert await send(http, url) == b"ok"
        with pytest.raises(EngineLost) as lost:
            await send(http, url)
    # No other request uses the connection of a repeated one.
    assert lost.value.reached and server.seen == [*[0] * len(script), 1, 2, 3]


@pytest.mark.parametrize("lost", [CLOSE, HALF])
async def test_request_that_may_not_be_repeated_is_sent_once_over_a_new_connection(
    lost: bytes,
) -> None:
    server = Server((BAD, CLOSE), (GOOD,), (lost,))
    async with server.listening() as url, open_connections() as http:
        await send(http, url)
        assert await send(http, url, repeats=False) == b"ok"
        with pytest.raises(EngineLost) as error:
            await send(http, url, repeats=False)
    assert error.value.reached and server.seen == [0, 1, 2]


async def test_engine_that_dies_before_the_second_attempt_counts_as_reached() -> None:
    server = Server((GOOD, END))
    async with server.listening() as url, open_connections() as http:
        await send(http, url)
        with pytest.raises(EngineLost) as lost:
            await send(http, url)
        assert lost.value.reached and server.seen == [0, 0]
        with pytest.raises(EngineLost) as lost:
            await send(http, url)
    assert not lost.value.reached


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/prompt_streams/1/append", True),
        ("POST", "/prompt_streams/1/keep_alive", True),
        ("DELETE", "/prompt_streams/1", True),
        ("POST", "/prompt_streams", True),
        ("POST", "/generate", True),
        ("POST", "/render", True),
        ("POST", "/update_weights_from_disk", False),
        ("POST", "/prompt_streams/1/append/x", False),
    ],
)
def test_requests_that_may_be_sent_twice(method: str, path: str, expected: bool) -> None:
    assert ForwardedRequest(method, path, path, {}, b"").is_repeatable == expected


def test_forwarded_target_is_the_one_that_the_client_sent() -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/tokenize/a b",
        "raw_path": b"/tokenize/a%20b\xe9",
        "query_string": b"c=%2F",
        "headers": [(b"host", b"x/flush_cache?")],
    }
    call = ForwardedRequest.from_client(Request(scope), b"")
    assert (call.path, call.target) == ("/tokenize/a b", "/tokenize/a%20b%E9?c=%2F")


async def test_connection_is_probed_while_an_answer_takes_long() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
        timers: list[str] = []

        async def never_answer(client: SocketStream) -> None:
            async with client:
                await client.receive()
                known = await anyio.Path("/proc/net/tcp").read_text()
                lines = [line.split() for line in known.splitlines()]
                timers.extend(line[5][:2] for line in lines if line[2].endswith(f":{port:04X}"))

        async with open_connections() as sending, anyio.create_task_group() as group:
            group.start_soon(listener.serve, never_answer)
            with pytest.raises(EngineLost):
                await send(sending, f"http://127.0.0.1:{port}/", repeats=False)
            group.cancel_scope.cancel()
    # This is the kernel's name for a keep-alive timer (proc(5)).
    assert timers == ["02"]


def test_headers_of_one_connection_are_not_passed_on() -> None:
    headers = {"Authorization": "Bearer k", "Expect": "100-continue", "Content-Length": "9"}
    assert select_forwarded_headers(headers) == {"Authorization": "Bearer k"}


def make_metrics() -> RouterMetrics:
    return RouterMetrics(Dispatcher(PrefixAware()))


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    """Return a counter's value; 0 if it was never raised."""
    every = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
    page, line = metrics.page({}).decode(), f"flashmoa_router_{name}_total{{{every}}} "
    return float(page.partition(line)[2].partition("\n")[0] or 0)


CALL = ForwardedRequest("POST", "/generate", "/generate", {}, b"body")


async def test_request_whose_client_leaves_before_the_answer_is_counted() -> None:
    metrics, server = make_metrics(), Server((SILENCE,))

    async def send(connections: Connections, url: str) -> None:
        await forward(
            connections, CALL, url, PlacementObserver(metrics, "engine"), AsyncExitStack()
        )

    async with (
        server.listening() as url,
        open_connections() as connections,
        anyio.create_task_group() as client,
    ):
        client.start_soon(send, connections, url)
        await server.is_asked.wait()
        client.cancel_scope.cancel()
    assert value(metrics, "requests", engine="engine", ending="left") == 1


@pytest.mark.parametrize("sent", [b'data: {"text": "a"}\n\n', b'data: {"text": "a"}\n\ndata: {"te'])
async def test_error_of_a_lost_engine_is_an_event_of_its_own(sent: bytes) -> None:
    metrics, relayed = make_metrics(), b""

    async def send(message: dict[str, bytes]) -> None:
        nonlocal relayed
        relayed += message.get("body", b"")

    async def receive() -> dict[str, str]:
        await anyio.sleep_forever()
        raise AssertionError

    server = Server((STREAM + sent,))
    async with server.listening() as url, open_connections() as connections:
        observer = PlacementObserver(metrics, "engine")
        answer = await forward(connections, CALL, url, observer, AsyncExitStack())
        assert isinstance(answer, RelayedStream)
        await answer({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert relayed.startswith(sent)
    before, error, rest = relayed.rsplit(b"\n\n", 2)
    assert error.startswith(b'data: {"error"') and rest == b"" and before == sent.rstrip(b"\n")
    assert value(metrics, "requests", engine="engine", ending="lost") == 1


OPENAI = b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}'
NATIVE = (
    b'{"text": "\\"cached_tokens\\": 7", "meta_info": {"prompt_tokens": 5, "cached_tokens": 2}}'
)


@pytest.mark.parametrize(
    ("pieces", "cached", "of"),
    [
        ([OPENAI], 4, 9),
        ([b"[", NATIVE, b", ", NATIVE, b"]"], 4, 10),
        ([b"data: " + NATIVE + b"\n\n"] * 3, 2, 5),
        ([b'{"usage": {"prompt_tokens": 9}}'], 0, 0),
    ],
)
def test_cached_tokens_are_counted_with_the_prompts_that_report_them(
    pieces: list[bytes], cached: int, of: int
) -> None:
    metrics = make_metrics()
    observer = PlacementObserver(metrics, "engine")
    whole = not pieces[0].startswith(b"data")
    for piece in [b"".join(pieces)] if whole else pieces:
        observer.receive(piece)
    observer.end("answered")
    assert value(metrics, "cached_tokens", engine="engine") == cached
    assert value(metrics, "cache_reported_tokens", engine="engine") == of
