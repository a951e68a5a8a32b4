"""A router's connections to engines: kept between requests, and given up before they break."""

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
from flashmoa.errors import FlashMoAError
from flashmoa.router.paths import Repeat

# Answers take as long as they take; the server's clients decide for how long.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
# However long an answer takes, a host that is gone without a word is found out in half a minute.
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Headers that aiohttp would add.
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# A connection that was closed before the answer's first byte; later that is a ClientPayloadError.
_CLOSED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)


class EngineLost(FlashMoAError):
    """Raised when an engine's connection breaks before anything of its answer was passed on.

    Attributes:
        reached: whether the engine can have got the request, and so have been ended by it.
    """

    def __init__(self, why: str, *, reached: bool = True) -> None:
        super().__init__(why)
        self.reached = reached


@dataclass(slots=True)
class _Attempt:
    """``reused``: on a connection that had been used before."""

    reused: bool = False

    def may_repeat(self, repeat: Repeat, error: BaseException | None) -> bool:
        if repeat is Repeat.UNANSWERED:
            return self.reused and isinstance(error, _CLOSED)
        return repeat is Repeat.ALWAYS


class Connections:
    """Sends requests to engines. httpx's work for each is most of what a router would do."""

    def __init__(self, kept: aiohttp.ClientSession, fresh: aiohttp.ClientSession) -> None:
        self._kept = kept
        self._fresh = fresh

    async def exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, repeat: Repeat
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """An engine's answer and its content; ``None`` where it is a stream, which is not read yet.

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
            lost.reached = True  # The first time it may have been.
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
    """What is said of a connection that broke."""
    return str(error) or type(error).__name__


class _Answer(aiohttp.ClientResponse):
    """After an error of the engine's own, nothing more is sent over its connection.

    Stock SGLang's web server closes it then, milliseconds after an answer that says nothing of it.
    """

    async def start(self, connection: Connection) -> Self:
        used = connection.protocol
        await super().start(connection)
        if self.status >= 500 and used is not None:
            used.force_close()
            if self.connection is None:
                # The answer was there at once, and its connection counts as free already.
                used.close()
        return self


@asynccontextmanager
async def connections() -> AsyncGenerator[Connections]:
    """Connections that are closed in the end."""
    heard = aiohttp.TraceConfig()
    heard.on_connection_reuseconn.append(_reused)
    # SGLang closes connections that were idle for 5 s; a request on its way then would be lost.
    kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, socket_factory=_probed)
    fresh = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_probed)
    async with _session(kept, heard) as usual, _session(fresh) as again:
        yield Connections(usual, again)


def _session(connector: aiohttp.TCPConnector, *heard: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=_TIMEOUT,
        auto_decompress=False,
        skip_auto_headers=_ADDED,
        cookie_jar=aiohttp.DummyCookieJar(),
        response_class=_Answer,
        trace_configs=list(heard),
    )


async def _reused(_http: aiohttp.ClientSession, context: SimpleNamespace, _told: object) -> None:
    context.trace_request_ctx.reused = True


def _probed(address: tuple[Any, ...]) -> socket.socket:
    """For aiohttp; ``address``: as ``getaddrinfo`` says it."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
