"""A router's connections to engines: kept between requests, and closed before they break."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from flashmoa.engine.connections import KEPT_SECONDS
from flashmoa.router.client_requests import Repeat
from flashmoa.router.errors import EngineLost

# Answers may take any time: the router's clients decide how long they wait.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
# A host that vanishes without closing its connections is noticed within half a minute, however
# long its answers take.
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Headers that aiohttp would add by itself.
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# The connection was closed before the answer's first byte; later that is a ClientPayloadError.
_CLOSED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)


@dataclass(slots=True)
class _Attempt:
    """One attempt to send a request. ``reused``: over a connection that had been used before."""

    reused: bool = False

    def may_repeat(self, repeat: Repeat, error: BaseException | None) -> bool:
        if repeat is Repeat.UNANSWERED:
            return self.reused and isinstance(error, _CLOSED)
        return repeat is Repeat.ALWAYS


class Connections:
    """Sends requests to engines over aiohttp: httpx would take most of the router's own time.

    Args:
        kept: keeps connections between requests; ``fresh``: opens one for each request.
    """

    def __init__(self, kept: aiohttp.ClientSession, fresh: aiohttp.ClientSession) -> None:
        self._kept = kept
        self._fresh = fresh

    async def exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, repeat: Repeat
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Return an engine's answer and its content; ``None`` for a stream, which is not read yet.

        The caller closes the answer. Raises: EngineLost.
        """
        attempt = _Attempt()
        try:
            return await self._send(self._kept, method, url, headers, body, attempt)
        except EngineLost as lost:
            if not (lost.reached and attempt.may_repeat(repeat, lost.__cause__)):
                raise
        try:
            return await self._send(self._fresh, method, url, headers, body, _Attempt())
        except EngineLost as lost:
            lost.reached = True  # The first attempt may have reached the engine.
            raise

    async def _send(
        self,
        http: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        attempt: _Attempt,
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        try:
            answer = await http.request(
                method,
                URL(url, encoded=True),
                headers=headers,
                data=body or None,
                allow_redirects=False,
                trace_request_ctx=attempt,
            )
            if answer.content_type == "text/event-stream":
                return answer, None
            return answer, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            reached = not isinstance(error, _NOT_REACHED)
            raise EngineLost(reason(error), reached=reached) from error


def reason(error: Exception) -> str:
    """Return why a connection broke, for messages."""
    return str(error) or type(error).__name__


class _EngineResponse(aiohttp.ClientResponse):
    """An answer after whose 5xx status nothing more is sent over its connection.

    Stock SGLang's web server closes it then, milliseconds after an answer that does not say so.
    """

    async def start(self, connection: Connection) -> Self:
        used = connection.protocol
        await super().start(connection)
        if self.status >= 500 and used is not None:
            used.force_close()
            if self.connection is None:
                # The whole answer was there at once, so its connection counts as free already.
                used.close()
        return self


@asynccontextmanager
async def connections() -> AsyncGenerator[Connections]:
    """Open connections, and close them when the context is left."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_reused)
    # SGLang closes connections that were idle for 5 s, and a request on its way then would be lost.
    kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, socket_factory=_probed)
    fresh = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_probed)
    async with _session(kept, trace) as usual, _session(fresh) as again:
        yield Connections(usual, again)


def _session(
    connector: aiohttp.TCPConnector, *traces: aiohttp.TraceConfig
) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=_TIMEOUT,
        auto_decompress=False,
        skip_auto_headers=_ADDED,
        cookie_jar=aiohttp.DummyCookieJar(),
        response_class=_EngineResponse,
        trace_configs=list(traces),
    )


async def _reused(_http: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


def _probed(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for aiohttp that probes its peer. ``address``: as of ``getaddrinfo``."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
