"""Make the HTTP client of an engine, given the engine's URL."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from flashmoa._concurrency import running_loop

# SGLang closes a connection that was idle for 5 s (``SGLANG_TIMEOUT_KEEP_ALIVE``). A request that
# is sent at that moment is lost, so the client closes idle connections long before.
KEPT_SECONDS = 2.0
# Few idle connections are kept, since httpx checks each of them at each request. The number in use
# has no limit here; engines limit it.
CONNECTIONS = httpx.Limits(
    max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEPT_SECONDS
)
_CONNECT_SECONDS = 10.0
_LOCAL = "http://127.0.0.1:30000"


def engine_url(base_url: str) -> str:
    """Return an engine's root URL, given that URL or the one for OpenAI clients (``.../v1``).

    Raises: ValueError if it is not an HTTP URL, or has a password, which would be in logs, traces
        and messages.
    """
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # Unbalanced brackets, or a port that is not a number.
        raise ValueError(f"{base_url!r} is not an engine's URL; give http://HOST:PORT") from None
    if not usable:
        raise ValueError(f"{base_url!r} is not an engine's URL; give http://HOST:PORT")
    if "@" in parts.netloc:
        raise ValueError(
            f"the URL of {parts.hostname} has a user name or a password; give them in a header, "
            "such as default_headers={'Authorization': 'Basic ...'}"
        )
    # Schemes may be in capitals.
    url = f"{parts.scheme}{base_url[len(parts.scheme) :]}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def self_hosted_url(base_url: str | None) -> str:
    """Return the root URL of the engine at ``base_url``.

    The default is ``OPENAI_BASE_URL`` in the environment, and then SGLang's default address.
    """
    return engine_url(base_url or os.environ.get("OPENAI_BASE_URL") or _LOCAL)


def make_http_client(
    url: str, api_key: str | None, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None
) -> httpx.AsyncClient:
    """Make the HTTP client of one engine; ``timeout`` in seconds."""
    all_headers = dict(headers or {})
    if api_key:
        all_headers["Authorization"] = f"Bearer {api_key}"
    if not isinstance(timeout, httpx.Timeout):
        timeout = httpx.Timeout(timeout, connect=_CONNECT_SECONDS)
    transport = EachLoop(verification(url), _proxy_of(url))
    return httpx.AsyncClient(
        base_url=url, headers=all_headers, timeout=timeout, transport=transport
    )


def verification(url: str) -> ssl.SSLContext | bool:
    """Return how an engine's certificate is checked; see :class:`httpx.AsyncClient`."""
    return not url.startswith("http://") and _tls_context()


@cache
def _tls_context() -> ssl.SSLContext:
    # Reading the certificates blocks the event loop for 20 ms, so this is done once.
    return httpx.create_ssl_context()


_Connections = httpx.AsyncHTTPTransport


class EachLoop(httpx.AsyncBaseTransport):
    """Keeps connections of its own for each event loop that requests are sent in.

    A connection is of no use outside the loop that opened it, and cannot even be closed there. So
    an async generator holds a loop's connections: the loop of ``asyncio.run``, for instance, closes
    all its generators when it ends.

    Args:
        verify: how certificates are checked; see :class:`httpx.AsyncClient`.
        proxy: the URL of the proxy to the engine; ``None``: there is none.
    """

    def __init__(self, verify: ssl.SSLContext | bool, proxy: str | None) -> None:
        self._proxy = proxy
        self._verify = verify
        self._by_loop: dict[asyncio.AbstractEventLoop | None, AsyncGenerator[_Connections]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await (await self._connections()).handle_async_request(request)

    async def aclose(self) -> None:
        own = self._by_loop.pop(running_loop(), None)
        # Loops that still run in other threads close theirs now.
        self._by_loop.clear()
        if own is not None:
            await own.aclose()

    async def _connections(self) -> _Connections:
        loop = running_loop()
        held = self._by_loop.get(loop)
        # A loop that is ending may have closed its generators already.
        connections = None if held is None else await anext(held, None)
        if connections is None:
            for other in list(self._by_loop):
                if other is not None and other.is_closed():
                    self._by_loop.pop(other, None)
            held = self._by_loop[loop] = self._hold_connections()
            connections = await anext(held)
        return connections

    async def _hold_connections(self) -> AsyncGenerator[_Connections]:
        """Yield the same connections again and again; close them in the end."""
        transport = _Connections(verify=self._verify, limits=CONNECTIONS, proxy=self._proxy)
        async with transport as connections:
            while True:
                yield connections


def keep_by_loop(http: httpx.AsyncClient) -> None:
    """Let an HTTP client that has sent nothing keep connections for each event loop.

    Requests that go through a proxy of its own keep those of any loop.
    """
    pool = getattr(http._transport, "_pool", None)
    if type(http._transport) is _Connections and pool is not None and not pool.connections:
        # Copies of its OpenAI client may send to servers at other URLs, also with TLS.
        http._transport = EachLoop(pool._ssl_context, None)


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, if any."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    # A host of NO_PROXY may have a port; that of an IPv6 address is compared without brackets.
    if proxy is None or proxy_bypass(parts.netloc) or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
