"""Send requests to engines over connections that are kept between requests (`Connections`)."""

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
from flashmoa.router.client_requests import RetryRule
from flashmoa.router.errors import EngineLost

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
# Errors of a connection that was closed before the answer's first byte; if it is closed later,
# aiohttp raises a ClientPayloadError.
_CLOSED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)


@dataclass(slots=True)
class _Attempt:
    """Records whether a request was sent over a connection that had been used before."""

    reused: bool = False

    def may_repeat(self, rule: RetryRule, error: BaseException | None) -> bool:
        if rule is RetryRule.ON_REUSED_CONNECTION:
            return self.reused and isinstance(error, _CLOSED)
        return rule is RetryRule.ALWAYS


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
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, rule: RetryRule
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Send a request, and once more if its connection breaks and ``rule`` allows that.

        Return the answer, which the caller closes, and its content. If the answer is a stream, the
        content is ``None``, and the caller reads it.

        Raises: EngineLost if there is no answer.
        """
        attempt = _Attempt()
        try:
            return await self._send(self._kept, method, url, headers, body, attempt)
        except EngineLost as lost:
            if not (lost.reached and attempt.may_repeat(rule, lost.__cause__)):
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
            raise EngineLost(describe_error(error), reached=reached) from error


def describe_error(error: Exception) -> str:
    """Return why a connection broke, for messages."""
    return str(error) or type(error).__name__


class _EngineResponse(aiohttp.ClientResponse):
    """Closes its connection if its status is 5xx.

    Stock SGLang's web server closes the connection milliseconds after such an answer without saying
    so in the answer, and a request that is sent in between would be lost.
    """

    async def start(self, connection: Connection) -> Self:
        protocol = connection.protocol
        await super().start(connection)
        if self.status >= 500 and protocol is not None:
            protocol.force_close()
            if self.connection is None:
                # The whole answer arrived at once, so aiohttp has released its connection already.
                protocol.close()
        return self


@asynccontextmanager
async def open_connections() -> AsyncGenerator[Connections]:
    """Open the sessions, and close their connections when the context is left."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_record_reuse)
    # SGLang closes a connection that was idle for 5 s. A request that is sent just then would be
    # lost, so the router closes its idle connections earlier.
    kept = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=KEPT_SECONDS, socket_factory=_make_probed_socket
    )
    fresh = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_make_probed_socket)
    async with _make_session(kept, trace) as kept_session, _make_session(fresh) as fresh_session:
        yield Connections(kept_session, fresh_session)


def _make_session(
    connector: aiohttp.TCPConnector, *traces: aiohttp.TraceConfig
) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=_TIMEOUT,
        auto_decompress=False,
        skip_auto_headers=_ADDED_HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
        response_class=_EngineResponse,
        trace_configs=list(traces),
    )


async def _record_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: object
) -> None:
    context.trace_request_ctx.reused = True


def _make_probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for aiohttp that probes its peer. ``address``: see ``getaddrinfo``."""
    probed = socket.socket(*address[:3])
    probed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:
            probed.setsockopt(socket.IPPROTO_TCP, option, value)
    return probed
