"""Send server-sent events to a client (``EventStream``)."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx buffers answers unless they say that it must not.
    (b"x-accel-buffering", b"no"),
]
# The lines of a comment begin with a colon. Every client skips them.
_HEARTBEAT = b": agents are working\n\n"


class EventStream:
    """The body of an answer of which each part is an event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last_sent = -math.inf

    async def event(self, body: Mapping[str, Any]) -> None:
        """Send a JSON object."""
        await self._write(f"data: {json.dumps(body)}\n\n".encode())

    async def _write(self, data: bytes) -> None:
        self._last_sent = anyio.current_time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self, seconds: float) -> None:
        """Send a comment whenever nothing was sent for some seconds, until it is cancelled."""
        while True:
            await anyio.sleep_until(self._last_sent + seconds)
            if anyio.current_time() >= self._last_sent + seconds:
                await self._write(_HEARTBEAT)


@asynccontextmanager
async def sending_events(send: Send, heartbeat_seconds: float) -> AsyncGenerator[EventStream]:
    """Send the head of an answer, yield its body, and end it.

    Proxies and clients end connections on which nothing comes for a while. So a comment is sent
    while there is no event for ``heartbeat_seconds``.
    """
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    stream = EventStream(send)
    async with anyio.create_task_group() as group:
        group.start_soon(stream.keep_alive, heartbeat_seconds)
        yield stream
        group.cancel_scope.cancel()
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
