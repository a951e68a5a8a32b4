"""Pass connections on to an engine, or fail like engines and proxies that fail."""

import re
import socket
import struct
from contextlib import AbstractAsyncContextManager, suppress
from typing import Literal, get_args
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream

from tests.unit.engine.faulty_engine import listening

# ``down``: connections are closed; ``hang``: nothing is answered; ``stall``: an answer stops in the
# middle; ``refuse``: 503; ``garbage``: events that are not JSON; ``endless``: one piece of text
# again and again, whatever ``max_tokens`` says.
Fault = Literal["down", "hang", "stall", "refuse", "garbage", "endless"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
# ``reset``: the connection of one answer breaks; ``stall``: one answer stops until it is released.
ArmedFault = Literal["reset", "stall"]

_BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"
_GARBAGE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b"data: <html>bad gateway</html>\n\n"
)
# A chunk of an HTTP body that is an event with text.
_TEXT_CHUNK = re.compile(rb'[0-9a-f]+\r\ndata: [^\n]*"content":"[^"][^\n]*\n\n\r\n')
# How many events pass before every answer stalls.
_EVENTS = 6


class FaultyProxy:
    """Stands before an engine.

    Attributes:
        url, target: URLs of the proxy and of the engine.
        fault: the fault of every request that comes from now on; ``None`` for no fault.
        has_struck: whether the armed fault has happened.
    """

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.target = target
        self.fault: Fault | None = None
        self.has_struck = False
        self._armed: ArmedFault | None = None
        self._left = 0
        self._released = anyio.Event()
        self._calls: list[SocketStream] = []  # The connections of calls.

    def arm(self, fault: ArmedFault, events: int = 12) -> None:
        """Make the next answer go wrong after ``events`` events.

        Events of the answer count, and events of a connection that hears the answer.
        """
        self._armed, self._left = fault, events

    def release(self) -> None:
        """Let the answer that the armed fault has stalled continue."""
        self._released.set()

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
                    await self._relay(client)

    async def _relay(self, client: SocketStream) -> None:
        parts = urlsplit(self.target)
        assert parts.hostname and parts.port
        async with (
            await anyio.connect_tcp(parts.hostname, parts.port) as engine,
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._pass_on, client, engine, group.cancel_scope)
            with suppress(*_BROKEN):
                await self._pass_back(engine, client)
            group.cancel_scope.cancel()

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

    async def _pass_back(self, engine: SocketStream, client: SocketStream) -> None:
        events = 0
        while True:
            piece = await engine.receive()
            if self.fault == "stall":
                events += piece.count(b"data: ")
                if events > _EVENTS:
                    await anyio.sleep_forever()
            fault = self._strike(piece)
            if fault == "stall":
                await self._released.wait()
            elif fault == "reset":
                # A whole answer is heard on another connection than its call's.
                call = client if client in self._calls else self._calls[-1]
                _make_reset(call)
                if call is client:
                    return
                await call.aclose()
            await client.send(piece)
            text = _TEXT_CHUNK.search(piece) if self.fault == "endless" else None
            while text is not None:
                await client.send(text.group())

    def _strike(self, piece: bytes) -> ArmedFault | None:
        """Return the armed fault if it is due at this piece of an answer, and disarm it."""
        if self._armed is None:
            return None
        self._left -= piece.count(b"data: ") + piece.count(b'{"call":')
        if self._left >= 0:
            return None
        fault, self._armed, self.has_struck = self._armed, None, True
        return fault


def _make_reset(stream: SocketStream) -> None:
    """Make the stream send RST instead of FIN when it is closed."""
    plain: socket.socket = stream.extra(SocketAttribute.raw_socket)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def start_faulty_proxy(target: str) -> AbstractAsyncContextManager[FaultyProxy]:
    """Start a proxy before an engine."""
    return listening(lambda url: FaultyProxy(url, target))
