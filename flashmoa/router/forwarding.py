"""Forward requests to engines (`Connections`, `forward`), and relay their answers."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from flashmoa._starlette import while_connected
from flashmoa.engine.connections import KEPT_SECONDS
from flashmoa.router.client_requests import ForwardedRequest, select_forwarded_headers
from flashmoa.router.errors import EngineLost

EVENT_END = b"\n\n"
# An answer may take any time, because the router's clients decide how long they wait for it.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
# TCP shows within half a minute that a host has vanished without closing its connections: probes,
# while the router waits for a long answer, and a limit, while a request is not acknowledged.
_PROBES = {
    "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000
}  # fmt: skip
# Headers that aiohttp would add to the client's.
_ADDED_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Connections:
    """Sends requests to engines with aiohttp; httpx would take most of the router's own time.

    Args:
        kept: a session that keeps its connections for later requests.
        fresh: a session that opens a new connection for each request.
    """

    def __init__(self, kept: aiohttp.ClientSession, fresh: aiohttp.ClientSession) -> None:
        self._kept = kept
        self._fresh = fresh

    async def exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, *, repeats: bool
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Send a request, and if its connection breaks once more, over a new one.

        An engine may have closed a kept connection before the request arrived: SGLang does so
        milliseconds after an answer with status 500, and does not say so in the answer.

        Args:
            repeats: whether the request may be sent twice. If not, it is sent once, over a new
                connection.

        Return the answer, which the caller closes, and its content. If the answer is a stream, the
        content is ``None``, and the caller reads it.

        Raises: EngineLost if there is no answer.
        """
        request = (method, url, headers, body)
        if not repeats:
            return await _send(self._fresh, *request)
        try:
            return await _send(self._kept, *request)
        except EngineLost as lost:
            if not lost.reached:
                raise
        try:
            return await _send(self._fresh, *request)
        except EngineLost as lost:
            lost.reached = True  # The first attempt may have reached the engine.
            raise

    async def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        seconds: float,
    ) -> Response | None:
        """Send a small request that can be repeated. Return ``None`` if no answer comes in time.

        Raises: EngineLost as :meth:`exchange`.
        """
        with anyio.move_on_after(seconds):
            answer, content = await self.exchange(method, url, headers, body, repeats=True)
            answer.close()
            return Response(content, answer.status, media_type=answer.content_type)
        return None


async def _send(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
) -> tuple[aiohttp.ClientResponse, bytes | None]:
    try:
        answer = await http.request(
            method,
            URL(url, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
        )
        if answer.content_type == "text/event-stream":
            return answer, None
        return answer, await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        reached = not isinstance(error, _NOT_REACHED)
        raise EngineLost(_describe_error(error), reached=reached) from error


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__


@asynccontextmanager
async def open_connections() -> AsyncGenerator[Connections]:
    """Open the sessions, and close their connections when the context is left."""
    # SGLang closes a connection that was idle for 5 s. A request that is sent just then would be
    # lost, so the router closes its idle connections earlier.
    kept = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=KEPT_SECONDS, socket_factory=_make_probed_socket
    )
    fresh = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_make_probed_socket)
    async with _make_session(kept) as kept_session, _make_session(fresh) as fresh_session:
        yield Connections(kept_session, fresh_session)


def _make_session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=_TIMEOUT,
        auto_decompress=False,
        skip_auto_headers=_ADDED_HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _make_probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for aiohttp that probes its peer. ``address``: see ``getaddrinfo``."""
    probed = socket.socket(*address[:3])
    probed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:
            probed.setsockopt(socket.IPPROTO_TCP, option, value)
    return probed


class AnswerObserver:
    """Reads an answer while the router relays it."""

    def receive(self, content: bytes) -> None:
        """Process the next piece of a stream, or all of a successful answer without streaming."""

    def end(self, ending: str) -> None:
        """Process the end of the answer: ``answered``, ``refused``, ``left`` or ``lost``."""


async def forward(
    connections: Connections,
    call: ForwardedRequest,
    engine: str,
    observer: AnswerObserver,
    stack: AsyncExitStack,
) -> Response:
    """Return the engine's answer: a whole one, or a stream that is relayed as it is read.

    A stream is not read ahead of its client, and if the client leaves, the engine's request is
    aborted.

    Args:
        engine: URL of the engine.
        stack: is closed by the caller. A stream takes over its contents, and closes them at its
            end.

    Raises: EngineLost if there is no answer.
    """
    try:
        answer, content = await connections.exchange(
            call.method,
            engine + call.target,
            call.headers,
            call.body,
            repeats=call.is_repeatable,
        )
    except EngineLost as error:
        observer.end("lost")
        raise EngineLost(f"{engine}: {error}", reached=error.reached) from error
    except anyio.get_cancelled_exc_class():
        observer.end("left")
        raise
    stack.callback(answer.close)
    if content is None:
        return RelayedStream(answer, observer, stack.pop_all())
    if answer.ok:
        observer.receive(content)
    observer.end("answered" if answer.ok else "refused")
    return Response(content, answer.status, select_forwarded_headers(answer.headers))


class RelayedStream(StreamingResponse):
    """Relays a stream to the client, and releases everything even if the client never reads it."""

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        observer: AnswerObserver,
        stack: AsyncExitStack,
    ) -> None:
        self._pieces = self._read(answer)
        super().__init__(self._pieces, answer.status, select_forwarded_headers(answer.headers))
        self._observer = observer
        self._stack = stack
        self._ending = "left"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(Request(scope, receive)):
                await self.stream_response(send)
        finally:
            await self._release()

    async def drain(self) -> None:
        """Read the stream to its end for its observer, instead of relaying it."""
        try:
            async for _ in self._pieces:
                pass
        finally:
            await self._release()

    async def _release(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._pieces.aclose()
            self._observer.end(self._ending)
            await self._stack.aclose()

    async def _read(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        piece = EVENT_END
        try:
            async for piece in answer.content.iter_any():
                self._observer.receive(piece)
                yield piece
            self._ending = "answered"
        except (aiohttp.ClientError, TimeoutError) as error:
            self._ending = "lost"
            # The engine may have sent only the beginning of an event.
            if not piece.endswith(EVENT_END):
                yield EVENT_END
            yield _make_error_event(_describe_error(error))


def _make_error_event(reason: str) -> bytes:
    error = {"message": f"The engine is gone: {reason}; send the request again", "code": 502}
    return f"data: {json.dumps({'error': error})}\n\n".encode()
