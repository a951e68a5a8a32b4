"""Relay connections to an engine, and break off or stall an answer on demand."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream

Fault = Literal["reset", "stall"]
_BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class Relay:
    """Passes connections on to an engine.

    Attributes:
        url, target: URLs of the relay and of the engine.
        has_struck: whether the armed fault has happened.
    """

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.target = target
        self.has_struck = False
        self._released = anyio.Event()
        self._fault: Fault | None = None
        self._left = 0
        self._calls: list[SocketStream] = []  # The connections of calls.

    def arm(self, fault: Fault, events: int = 12) -> None:
        """Make the next answer go wrong after ``events`` events.

        Events of the answer count, and events of a connection that hears the answer.
        """
        self._fault, self._left = fault, events

    def release(self) -> None:
        """Let a stalled answer continue."""
        self._released.set()

    async def serve(self, client: SocketStream) -> None:
        parts = urlsplit(self.target)
        assert parts.hostname and parts.port
        async with client:
            with suppress(*_BROKEN):
                async with (
                    await anyio.connect_tcp(parts.hostname, parts.port) as engine,
                    anyio.create_task_group() as group,
                ):
                    group.start_soon(self._pass_on, client, engine, group.cancel_scope)
                    await self._pass_back(engine, client)
                    group.cancel_scope.cancel()

    async def _pass_back(self, engine: SocketStream, client: SocketStream) -> None:
        with suppress(*_BROKEN):
            while True:
                piece = await engine.receive()
                if self._fault is not None:
                    self._left -= piece.count(b"data: ") + piece.count(b'{"call":')
                    if self._left < 0:
                        fault, self._fault = self._fault, None
                        self.has_struck = True
                        if fault == "reset" and client in self._calls:
                            _make_reset(client)
                            return
                        if fault == "reset":  # A whole answer is heard on another connection.
                            _make_reset(self._calls[-1])
                            await self._calls[-1].aclose()
                            await client.send(piece)
                            continue
                        await self._released.wait()
                await client.send(piece)

    async def _pass_on(
        self, client: SocketStream, engine: SocketStream, both: anyio.CancelScope
    ) -> None:
        with suppress(*_BROKEN):
            while True:
                piece = await client.receive()
                if piece.startswith(b"POST /v1/chat/completions"):
                    self._calls.append(client)
                await engine.send(piece)
        both.cancel()


def _make_reset(stream: SocketStream) -> None:
    """Make the stream send RST instead of FIN when it is closed."""
    plain: socket.socket = stream.extra(SocketAttribute.raw_socket)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@asynccontextmanager
async def start_relay(target: str) -> AsyncGenerator[Relay]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        port = listener.extra(SocketAttribute.local_port)
        relay = Relay(f"http://127.0.0.1:{port}", target)
        group.start_soon(listener.serve, relay.serve)
        yield relay
        group.cancel_scope.cancel()
