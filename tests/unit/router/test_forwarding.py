"""Test connections to engines, which may break, and how answers are relayed and counted."""

import errno
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.responses import Response

from flashmoa.router import forwarding
from tests.unit.engine.faulty_engine import receive
from tests.unit.router.support import RouterClient

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BAD = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno"
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"
CLOSE = b""
END = b"end"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n"
SILENCE = b"silence"


class Server:
    """Answers the requests of each connection by a script.

    ``CLOSE`` in a script closes the connection, and ``END`` also the server; what begins with
    ``STREAM`` is the last answer before a connection ends.

    Attributes:
        seen: the number of the connection over which each request arrived.
    """

    def __init__(self, *scripts: tuple[bytes, ...]) -> None:
        self._scripts = iter(enumerate(scripts))
        self.seen: list[int] = []
        self.is_asked = anyio.Event()

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
        number, script = next(self._scripts)
        async with client:
            for answer in script:
                await receive(client)
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


async def ask(http: forwarding.Connections, url: str) -> bytes:
    answer = await http.ask(url, {}, b"body", seconds=30)
    assert answer is not None
    return bytes(answer.body)


@pytest.mark.parametrize("lost", [CLOSE, HALF])
async def test_each_request_has_its_own_connection(lost: bytes) -> None:
    """After a 500, SGLang closes a connection without saying so in the answer."""
    server = Server((BAD,), (GOOD,), (lost,), (END,))
    async with server.listening() as url, forwarding.open_connections() as http:
        assert (await ask(http, url), await ask(http, url)) == (b"no", b"ok")
        for is_reached in (True, True, False):
            with pytest.raises(forwarding.EngineLost) as error:
                await ask(http, url)
            assert error.value.reached == is_reached
    assert server.seen == [0, 1, 2, 3]


async def test_the_target_is_forwarded_as_sent() -> None:
    calls: list[forwarding.ForwardedRequest] = []

    async def answer(call: forwarding.ForwardedRequest) -> Response:
        calls.append(call)
        return Response()

    app = Starlette(routes=[forwarding.make_route("/{path:path}", answer, 10, "POST")])
    ours = {"authorization": "Bearer k"}
    headers = {"host": "x/flush_cache?", "Expect": "100-continue", "Content-Length": "9"}
    await RouterClient(app)("POST", "/tokenize/a%20b\xe9", b"", headers | ours, b"c=%2F")
    (call,) = calls
    assert (call.path, call.target) == ("/tokenize/a b\xe9", "/tokenize/a%20b%C3%A9?c=%2F")
    # Headers of the connection are not passed on.
    assert call.headers == ours


def count(connections: forwarding.Connections, ending: str) -> float:
    """Return the number of requests that have ended so."""
    page = generate_latest(connections.counted).decode()
    rows = [row for row in page.splitlines() if f'ending="{ending}"' in row and "_total" in row]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


CALL = forwarding.ForwardedRequest("POST", "/generate", "/generate", {}, b"body")


async def test_a_waiting_request_is_probed_and_counted() -> None:
    server = Server((SILENCE,))
    async with (
        server.listening() as url,
        forwarding.open_connections() as connections,
        anyio.create_task_group() as client,
    ):
        client.start_soon(connections.forward, CALL, url)
        await server.is_asked.wait()
        known = await anyio.Path("/proc/net/tcp").read_text()
        port = f":{int(url.rpartition(':')[2]):04X}"
        lines = [line.split() for line in known.splitlines()]
        timers = [line[5][:2] for line in lines if line[2].endswith(port)]
        client.cancel_scope.cancel()
    # This is the kernel's name for a keep-alive timer (proc(5)).
    assert timers == ["02"]
    assert count(connections, "left") == 1


async def test_a_limit_of_the_router_is_not_a_lost_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(forwarding, "_make_probed_socket", refuse)
    async with forwarding.open_connections() as connections:
        with pytest.raises(
            forwarding.LimitReached, match=r"Too many open files.*ulimit -n"
        ) as error:
            await connections.forward(CALL, "http://127.0.0.1:9")
    assert error.value.status == 503 and count(connections, "refused") == 1


@pytest.mark.parametrize("sent", [b'data: {"text": "a"}\n\n', b'data: {"text": "a"}\n\ndata: {"te'])
async def test_a_lost_engine_is_an_event_of_its_own(sent: bytes) -> None:
    relayed = b""

    async def send(message: dict[str, bytes]) -> None:
        nonlocal relayed
        relayed += message.get("body", b"")

    async def receive() -> dict[str, str]:
        await anyio.sleep_forever()
        raise AssertionError

    server = Server((STREAM + sent,))
    async with server.listening() as url, forwarding.open_connections() as connections:
        answer = await connections.forward(CALL, url)
        await answer({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert relayed.startswith(sent)
    before, error, rest = relayed.rsplit(b"\n\n", 2)
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "502"
    assert rest == b"" and before == sent.rstrip(b"\n")
    assert count(connections, "lost") == 1
