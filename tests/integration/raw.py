"""Write HTTP by hand, so that a connection can misbehave in any part of a request."""

import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream


def make_request(path: str, body: Any) -> bytes:
    """Return a complete POST request; ``body`` is sent as JSON, or as it is if it is bytes."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class RawConnection:
    """One TCP connection to an engine."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._received = b""

    @classmethod
    async def open(cls, url: str) -> "RawConnection":
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        return cls(await anyio.connect_tcp(parts.hostname, parts.port))

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def send_half(self, data: bytes) -> bytes:
        """Send all but the last part of the body, and return the rest."""
        left = max(1, (len(data) - data.index(b"\r\n\r\n") - 4) // 2)
        await self.send(data[:-left])
        return data[-left:]

    async def reset(self) -> None:
        """Close the connection so that the other side gets RST instead of FIN."""
        plain: socket.socket = self._stream.extra(SocketAttribute.raw_socket)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await anyio.aclose_forcefully(self._stream)

    async def half_close(self) -> None:
        """Close the sending direction only."""
        await self._stream.send_eof()

    async def close(self) -> None:
        await self._stream.aclose()

    async def read_until(self, mark: bytes) -> bytes:
        """Return the bytes up to and with ``mark``.

        Raises: anyio.EndOfStream if the connection ends before.
        """
        while mark not in self._received:
            self._received += await self._stream.receive()
        end = self._received.index(mark) + len(mark)
        piece, self._received = self._received[:end], self._received[end:]
        return piece

    async def read_answer(self) -> tuple[int, Any]:
        """Return status and JSON of an answer that is not streamed."""
        head = (await self.read_until(b"\r\n\r\n")).decode().lower()
        status = int(head.split(" ", 2)[1])
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        while len(self._received) < length:
            self._received += await self._stream.receive()
        body, self._received = self._received[:length], self._received[length:]
        return status, json.loads(body)

    async def wait_until_closed(self) -> bool:
        """Read until the engine closes the connection, and return ``True``."""
        try:
            while True:
                self._received += await self._stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return True
