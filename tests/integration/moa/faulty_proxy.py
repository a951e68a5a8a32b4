"""Pass requests on to an engine, or answer them like engines and proxies that fail."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Literal, get_args
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream

# ``down``: connections are closed; ``hang``: nothing is answered; ``stall``: an answer stops in the
# middle; ``refuse``: 503; ``garbage``: events that are not JSON; ``endless``: one piece of text
# again and again, whatever ``max_tokens`` says.
Fault = Literal["down", "hang", "stall", "refuse", "garbage", "endless"]
FAULTS: tuple[Fault, ...] = get_args(Fault)

_BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"
_GARBAGE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b"data: <html>bad gateway</html>\n\n"
)
# A chunk of an HTTP body that is an event with text.
_TEXT_CHUNK = re.compile(rb'[0-9a-f]+\r\ndata: [^\n]*"content":"[^"][^\n]*\n\n\r\n')
# How many events pass before an answer stalls.
_EVENTS = 6


class FaultyProxy:
    """Stands before an engine.

    Attributes:
        url, target: URLs of the proxy and of the engine.
        fault: the fault of every request that comes from now on; ``None`` for no fault.
    """

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.target = target
        self.fault: Fault | None = None

    async def serve(self, client: SocketStream) -> None:
        """Serve one connection."""
        async with client:
            with suppress(*_BROKEN):
                if self.fault in ("hang", "refuse", "garbage"):
                    await client.receive()
                if self.fault == "hang":
                    await anyio.sleep_forever()
                elif self.fault in ("refuse", "garbage"):
                    await client.send(_REFUSAL if self.fault == "refuse" else _GARBAGE)
                elif self.fault != "down":
                    await self._pass_on(client)

    async def _pass_on(self, client: SocketStream) -> None:
        parts = urlsplit(self.target)
        assert parts.hostname and parts.port
        async with (
            await anyio.connect_tcp(parts.hostname, parts.port) as engine,
            anyio.create_task_group() as group,
        ):
            group.start_soon(_copy, client, engine, group.cancel_scope)
            with suppress(*_BROKEN):
                await self._pass_back(engine, client)
            group.cancel_scope.cancel()

    async def _pass_back(self, engine: SocketStream, client: SocketStream) -> None:
        events = 0
        while True:
            piece = await engine.receive()
            if self.fault == "stall":
                events += piece.count(b"data: ")
                if events > _EVENTS:
                    await anyio.sleep_forever()
            await client.send(piece)
            text = _TEXT_CHUNK.search(piece) if self.fault == "endless" else None
            while text is not None:
                await client.send(text.group())


async def _copy(client: SocketStream, engine: SocketStream, both: anyio.CancelScope) -> None:
    with suppress(*_BROKEN):
        while True:
            await engine.send(await client.receive())
    both.cancel()


@asynccontextmanager
async def start_faulty_proxy(target: str) -> AsyncGenerator[FaultyProxy]:
    """Start a proxy before an engine."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        port = listener.extra(SocketAttribute.local_port)
        proxy = FaultyProxy(f"http://127.0.0.1:{port}", target)
        group.start_soon(listener.serve, proxy.serve)
        yield proxy
        group.cancel_scope.cancel()
