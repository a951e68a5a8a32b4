"""Test how a router handles connections to engines that break, or are about to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from flashmoa.router.client_requests import ForwardedRequest, Repeat
from flashmoa.router.connections import Connections, connections
from flashmoa.router.errors import EngineLost

pytestmark = pytest.mark.anyio
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BAD = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"
CLOSE = b""
END = b"end"
# The body is sent once the event is set.
EVENTS = b"HTTP/1.1 500 -\r\ncontent-type: text/event-stream\r\ncontent-length: 2\r\n\r\n"


class Server:
    """Answers each connection's requests as the test says.

    ``CLOSE`` ends the connection, and ``END`` the server.

    Attributes:
        seen: number of the connection of each request.
    """

    def __init__(self, *scripts: tuple[bytes, ...]) -> None:
        self._scripts = list(scripts)
        self.seen: list[int] = []
        self.rest = anyio.Event()
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
                request = b""
                while not request.endswith(b"\r\n\r\nbody"):
                    request += await client.receive()
                self.seen.append(number)
                if answer is END:
                    await self._listener.aclose()
                if answer in (CLOSE, END):
                    return
                await client.send(answer)
                if answer is EVENTS:
                    await self.rest.wait()
                    await client.send(b"no")
                if answer is HALF:
                    return
            # The connection stays open until the client closes it.
            with pytest.raises(anyio.EndOfStream):
                await client.receive()


async def send(http: Connections, url: str, times: Repeat) -> tuple[int, bytes | None]:
    answer, content = await http.exchange("POST", url, {}, b"body", times)
    answer.close()
    return answer.status, content


async def test_connection_is_reused() -> None:
    server = Server((GOOD, GOOD))
    async with server.listening() as url, connections() as http:
        for _ in range(2):
            assert await send(http, url, Repeat.NEVER) == (200, b"ok")
    assert server.seen == [0, 0]


@pytest.mark.parametrize("answer", [BAD, LAST])
async def test_connection_that_will_be_closed_is_not_reused(answer: bytes) -> None:
    """After an error of its own, SGLang closes the connection without announcing it."""
    server = Server((answer,), (GOOD,))
    async with server.listening() as url, connections() as http:
        assert (await send(http, url, Repeat.NEVER))[0] == int(answer[9:12])
        assert await send(http, url, Repeat.NEVER) == (200, b"ok")
    assert server.seen == [0, 1]


async def test_connection_is_not_reused_after_a_streamed_error() -> None:
    server = Server((EVENTS,), (GOOD,))
    async with server.listening() as url, connections() as http:
        answer, content = await http.exchange("POST", url, {}, b"body", Repeat.NEVER)
        assert (answer.status, content) == (500, None)
        server.rest.set()
        assert await answer.read() == b"no"
        assert await send(http, url, Repeat.NEVER) == (200, b"ok")
    assert server.seen == [0, 1]


@pytest.mark.parametrize("times", [Repeat.ALWAYS, Repeat.UNANSWERED])
async def test_request_lost_on_a_reused_connection_is_repeated(times: Repeat) -> None:
    server = Server((GOOD, CLOSE), (GOOD,), (GOOD,))
    async with server.listening() as url, connections() as http:
        for _ in range(3):
            assert await send(http, url, times) == (200, b"ok")
    # It is repeated once, on a new connection that is not reused.
    assert server.seen == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("times", "script"),
    [
        (Repeat.NEVER, (GOOD, CLOSE)),
        (Repeat.UNANSWERED, (GOOD, HALF)),
        (Repeat.UNANSWERED, (CLOSE,)),
    ],
)
async def test_request_that_may_have_been_done_is_not_repeated(
    times: Repeat, script: tuple[bytes, ...]
) -> None:
    server = Server(script, (GOOD,))
    async with server.listening() as url, connections() as http:
        for _ in script[1:]:
            await send(http, url, times)
        with pytest.raises(EngineLost) as lost:
            await send(http, url, times)
    assert lost.value.reached and server.seen == [0] * len(script)


@pytest.mark.parametrize("script", [(GOOD, CLOSE), (GOOD, HALF), (CLOSE,), (HALF,)])
async def test_idempotent_request_is_repeated_once(script: tuple[bytes, ...]) -> None:
    server = Server(script, (GOOD,), (CLOSE,), (CLOSE,))
    async with server.listening() as url, connections() as http:
        for _ in script:
            assert await send(http, url, Repeat.ALWAYS) == (200, b"ok")
        with pytest.raises(EngineLost):
            await send(http, url, Repeat.ALWAYS)
    assert server.seen == [*[0] * len(script), 1, 2, 3]


async def test_engine_that_dies_before_the_second_attempt_counts_as_reached() -> None:
    server = Server((GOOD, END))
    async with server.listening() as url, connections() as http:
        await send(http, url, Repeat.UNANSWERED)
        with pytest.raises(EngineLost) as lost:
            await send(http, url, Repeat.UNANSWERED)
        assert lost.value.reached and server.seen == [0, 0]
        with pytest.raises(EngineLost) as lost:
            await send(http, url, Repeat.UNANSWERED)
    assert not lost.value.reached


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/prompt_streams/1/append", Repeat.ALWAYS),
        ("POST", "/prompt_streams/1/keep_alive", Repeat.ALWAYS),
        ("GET", "/prompt_streams/1", Repeat.ALWAYS),
        ("DELETE", "/prompt_streams/1", Repeat.ALWAYS),
        ("POST", "/prompt_streams", Repeat.UNANSWERED),
        ("POST", "/generate", Repeat.UNANSWERED),
        ("POST", "/render", Repeat.UNANSWERED),
        ("POST", "/update_weights_from_disk", Repeat.NEVER),
        ("POST", "/prompt_streams/1/append/x", Repeat.NEVER),
    ],
)
def test_every_route_has_its_repeat_rule(method: str, path: str, expected: Repeat) -> None:
    assert ForwardedRequest(method, path, path, {}, b"").repeat is expected
