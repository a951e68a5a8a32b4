"""Test how a router handles connections to engines that break or will soon break."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from flashmoa.router.client_requests import ForwardedRequest, RetryRule
from flashmoa.router.connections import Connections, open_connections
from flashmoa.router.errors import EngineLost

pytestmark = pytest.mark.anyio
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BAD = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"
CLOSE = b""
END = b"end"
# The headers of a stream; the server sends its body when the test sets ``may_send_body``.
EVENTS = b"HTTP/1.1 500 -\r\ncontent-type: text/event-stream\r\ncontent-length: 2\r\n\r\n"


class Server:
    """Answers the requests of each connection by a script.

    ``CLOSE`` in a script closes the connection, and ``END`` also the server.

    Attributes:
        seen: the number of the connection over which each request arrived.
    """

    def __init__(self, *scripts: tuple[bytes, ...]) -> None:
        self._scripts = list(scripts)
        self.seen: list[int] = []
        self.may_send_body = anyio.Event()
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
                    await self.may_send_body.wait()
                    await client.send(b"no")
                if answer is HALF:
                    return
            # The connection stays open until the client closes it.
            with pytest.raises(anyio.EndOfStream):
                await client.receive()


async def send(http: Connections, url: str, rule: RetryRule) -> tuple[int, bytes | None]:
    answer, content = await http.exchange("POST", url, {}, b"body", rule)
    answer.close()
    return answer.status, content


async def test_connection_is_reused() -> None:
    server = Server((GOOD, GOOD))
    async with server.listening() as url, open_connections() as http:
        for _ in range(2):
            assert await send(http, url, RetryRule.NEVER) == (200, b"ok")
    assert server.seen == [0, 0]


@pytest.mark.parametrize("answer", [BAD, LAST])
async def test_connection_that_will_be_closed_is_not_reused(answer: bytes) -> None:
    """After a 500, SGLang closes the connection without saying so in the answer."""
    server = Server((answer,), (GOOD,))
    async with server.listening() as url, open_connections() as http:
        assert (await send(http, url, RetryRule.NEVER))[0] == int(answer[9:12])
        assert await send(http, url, RetryRule.NEVER) == (200, b"ok")
    assert server.seen == [0, 1]


async def test_connection_is_not_reused_after_a_streamed_error() -> None:
    server = Server((EVENTS,), (GOOD,))
    async with server.listening() as url, open_connections() as http:
        answer, content = await http.exchange("POST", url, {}, b"body", RetryRule.NEVER)
        assert (answer.status, content) == (500, None)
        server.may_send_body.set()
        assert await answer.read() == b"no"
        assert await send(http, url, RetryRule.NEVER) == (200, b"ok")
    assert server.seen == [0, 1]


@pytest.mark.parametrize("rule", [RetryRule.ALWAYS, RetryRule.ON_REUSED_CONNECTION])
async def test_request_lost_on_a_reused_connection_is_repeated(rule: RetryRule) -> None:
    server = Server((GOOD, CLOSE), (GOOD,), (GOOD,))
    async with server.listening() as url, open_connections() as http:
        for _ in range(3):
            assert await send(http, url, rule) == (200, b"ok")
    # The request is repeated once, on a connection that no other request uses.
    assert server.seen == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("rule", "script"),
    [
        (RetryRule.NEVER, (GOOD, CLOSE)),
        (RetryRule.ON_REUSED_CONNECTION, (GOOD, HALF)),
        (RetryRule.ON_REUSED_CONNECTION, (CLOSE,)),
    ],
)
async def test_request_that_may_have_been_done_is_not_repeated(
    rule: RetryRule, script: tuple[bytes, ...]
) -> None:
    server = Server(script, (GOOD,))
    async with server.listening() as url, open_connections() as http:
        for _ in script[1:]:
            await send(http, url, rule)
        with pytest.raises(EngineLost) as lost:
            await send(http, url, rule)
    assert lost.value.reached and server.seen == [0] * len(script)


@pytest.mark.parametrize("script", [(GOOD, CLOSE), (GOOD, HALF), (CLOSE,), (HALF,)])
async def test_idempotent_request_is_repeated_once(script: tuple[bytes, ...]) -> None:
    server = Server(script, (GOOD,), (CLOSE,), (CLOSE,))
    async with server.listening() as url, open_connections() as http:
        for _ in script:
            assert await send(http, url, RetryRule.ALWAYS) == (200, b"ok")
        with pytest.raises(EngineLost):
            await send(http, url, RetryRule.ALWAYS)
    assert server.seen == [*[0] * len(script), 1, 2, 3]


async def test_engine_that_dies_before_the_second_attempt_counts_as_reached() -> None:
    server = Server((GOOD, END))
    async with server.listening() as url, open_connections() as http:
        await send(http, url, RetryRule.ON_REUSED_CONNECTION)
        with pytest.raises(EngineLost) as lost:
            await send(http, url, RetryRule.ON_REUSED_CONNECTION)
        assert lost.value.reached and server.seen == [0, 0]
        with pytest.raises(EngineLost) as lost:
            await send(http, url, RetryRule.ON_REUSED_CONNECTION)
    assert not lost.value.reached


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/prompt_streams/1/append", RetryRule.ALWAYS),
        ("POST", "/prompt_streams/1/keep_alive", RetryRule.ALWAYS),
        ("GET", "/prompt_streams/1", RetryRule.ALWAYS),
        ("DELETE", "/prompt_streams/1", RetryRule.ALWAYS),
        ("POST", "/prompt_streams", RetryRule.ON_REUSED_CONNECTION),
        ("POST", "/generate", RetryRule.ON_REUSED_CONNECTION),
        ("POST", "/render", RetryRule.ON_REUSED_CONNECTION),
        ("POST", "/update_weights_from_disk", RetryRule.NEVER),
        ("POST", "/prompt_streams/1/append/x", RetryRule.NEVER),
    ],
)
def test_repeat_rule_of_each_route(method: str, path: str, expected: RetryRule) -> None:
    assert ForwardedRequest(method, path, path, {}, b"").retry_rule is expected
