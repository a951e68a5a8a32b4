"""Merge several engines' reports about a client's calls into one channel (`HeardChannels`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager

import anyio
from anyio.abc import TaskGroup
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flashmoa._starlette import while_connected
from flashmoa.engine.wire import CALL_HEADER, CHANNEL_HEADER
from flashmoa.router.forwarding import (
    Connections,
    ForwardedRequest,
    RouterError,
    make_error_response,
)

CALLS = "/flashmoa/calls"
_CHANNEL_ID = re.compile(r"[0-9a-f]{16}")
# A call's id begins with its channel's id.
_CALL_ID = re.compile(r"([0-9a-f]{16})[0-9a-f]{16}")
_LISTENING = b'{"listening":true}'
# A client that lets more bytes wait than this loses its channel.
_MAX_WAITING_BYTES = 16 << 20


class HeardChannels:
    """The clients' open channels, and the calls in flight that name a channel.

    The router listens for a channel to each engine that has had a call of this channel. An engine
    reports a call from its beginning, so the router may begin to listen while the call runs.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._open: dict[str, _Channel] = {}
        # Calls in flight, by channel and engine.
        self._calls: Counter[tuple[str, str]] = Counter()

    def open(self, call: ForwardedRequest) -> Response:
        """Open a channel, or refuse it, and close an older channel of the same id.

        The caller has checked the client's API key.
        """
        channel_id = call.headers.get(CHANNEL_HEADER.lower(), "")
        if not _CHANNEL_ID.fullmatch(channel_id):
            message = (
                f"{CHANNEL_HEADER} must have 16 hexadecimal digits in lower case, with which the "
                "ids of the calls begin."
            )
            return make_error_response(400, message, "malformed")
        return _Channel(self, channel_id, self._connections, call)

    def close(self) -> None:
        """End all channels, which do not end by themselves."""
        for channel in self._open.values():
            channel.close()

    @contextmanager
    def calling(self, headers: Mapping[str, str], *engines: str) -> Generator[None]:
        """Listen to the engines that may get a call. It is in flight during this context.

        Args:
            headers: the call's headers, in lower case.
        """
        named = headers.get(CALL_HEADER.lower(), "").replace("-", "").lower()
        found = _CALL_ID.fullmatch(named)
        calls = [(found[1], engine) for engine in engines] if found else []
        self._calls.update(calls)
        for channel_id, engine in calls:
            if (channel := self._open.get(channel_id)) is not None:
                channel.listen_to(engine)
        try:
            yield
        finally:
            for call in calls:
                self._calls[call] -= 1
                if not self._calls[call]:
                    del self._calls[call]

    @contextmanager
    def _opened(self, channel_id: str, channel: _Channel) -> Generator[None]:
        if (older := self._open.get(channel_id)) is not None:
            older.close()
        self._open[channel_id] = channel
        for named, engine in self._calls:
            if named == channel_id:
                channel.listen_to(engine)
        try:
            yield
        finally:
            if self._open.get(channel_id) is channel:
                del self._open[channel_id]


class _Channel(StreamingResponse):
    """One client's channel, with the lines from all engines that the router listens to."""

    def __init__(
        self,
        channels: HeardChannels,
        channel_id: str,
        connections: Connections,
        call: ForwardedRequest,
    ) -> None:
        self._pieces = self._read()
        super().__init__(self._pieces, media_type="application/x-ndjson")
        self._channels = channels
        self._id = channel_id
        self._connections = connections
        self._call = call
        self._group: TaskGroup
        self._listened: dict[str, anyio.CancelScope] = {}
        self._waiting = bytearray()
        self._changed = anyio.Event()
        self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            while_connected(Request(scope, receive)),
            aclosing(self._pieces),
            anyio.create_task_group() as self._group,
        ):
            with self._channels._opened(self._id, self):
                await self.stream_response(send)
            self._group.cancel_scope.cancel()

    def listen_to(self, engine: str) -> None:
        """Listen to an engine, unless the router does already."""
        if engine not in self._listened and not self._is_closed:
            self._listened[engine] = anyio.CancelScope()
            self._group.start_soon(self._listen, engine)

    def close(self) -> None:
        """End the channel: another one replaces it, or its client does not read."""
        self._is_closed = True
        self._waiting.clear()
        self._changed.set()
        for listening in self._listened.values():
            listening.cancel()

    async def _listen(self, engine: str) -> None:
        status = 0
        with self._listened[engine]:
            try:
                url = engine + self._call.target
                status = await self._connections.read_lines(url, self._call.headers, self._tell)
            except RouterError:
                pass  # The clients of calls on this engine get an error.
        # An engine without this route is not asked again at each call.
        if status != 404:
            del self._listened[engine]

    def _tell(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if line and line != _LISTENING:
                self._waiting += line + b"\n"
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self.close()
        if self._waiting:
            self._changed.set()

    async def _read(self) -> AsyncGenerator[bytes]:
        yield _LISTENING + b"\n"
        while not self._is_closed:
            # After 5 s without news, an empty line shows that the channel is open.
            with anyio.move_on_after(5.0):
                await self._changed.wait()
            self._changed = anyio.Event()
            lines, self._waiting = self._waiting, bytearray()
            yield bytes(lines) or b"\n"
