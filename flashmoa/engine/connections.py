"""Make the HTTP client of an engine, given the engine's URL."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from flashmoa._concurrency import running_loop

# SGLang closes a connection after 5 idle seconds (``SGLANG_TIMEOUT_KEEP_ALIVE``). A request sent at
# that moment is lost, so the client closes idle connections long before. It keeps few of them,
# because httpx checks each one at each request. Engines themselves limit the open connections.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=2.0)
_LOCAL = "http://127.0.0.1:30000"


def engine_url(base_url: str) -> str:
    """Return an engine's root URL, given that URL or the one for OpenAI clients (``.../v1``).

    Raises: ValueError for a URL that is not HTTP, and for a URL with a password, which would appear
        in logs, traces and messages.
    """
    try:
        parts = urlsplit(base_url)  # It raises for unbalanced brackets; `port`, for words.
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"{base_url!r} is not an engine's URL; give http://HOST:PORT") from None
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


def self_hosted_key(api_key: Any, base_url: object) -> Any:
    """Return the API key for the engine at ``base_url``, if any.

    The default is ``OPENAI_API_KEY`` in the environment, but only for the environment's URL: a key
    of another service must not reach an engine.
    """
    is_by_environment = not base_url and os.environ.get("OPENAI_BASE_URL")
    own = os.environ.get("OPENAI_API_KEY") if is_by_environment else None
    return api_key or own


def make_http_client(
    url: str, api_key: str | None, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None
) -> httpx.AsyncClient:
    """Make the HTTP client of one engine; ``timeout`` in seconds."""
    all_headers = dict(headers or {})
    if api_key:
        all_headers["Authorization"] = f"Bearer {api_key}"
    if not isinstance(timeout, httpx.Timeout):
        timeout = httpx.Timeout(timeout, connect=10.0)
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
    """Keeps separate connections for each event loop that sends requests.

    A connection is useless outside the loop that opened it, and cannot even be closed there. So
    each loop's connections live in an async generator: ``asyncio.run``, for instance, closes all
    async generators of its loop at the end.

    ``verify`` is as in :class:`httpx.AsyncClient`, and ``proxy`` is the URL of a proxy.
    """

    def __init__(self, verify: ssl.SSLContext | bool, proxy: str | None) -> None:
        self._proxy = proxy
        self._verify = verify
        self._by_loop: dict[asyncio.AbstractEventLoop | None, AsyncGenerator[_Connections]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await (await self._connections()).handle_async_request(request)

    async def aclose(self) -> None:
        own = self._by_loop.pop(running_loop(), None)
        # This closes the connections of loops that still run in other threads.
        self._by_loop.clear()
        if own is not None:
            await own.aclose()

    async def _connections(self) -> _Connections:
        loop = running_loop()
        generator = self._by_loop.get(loop)
        # A loop that is ending may have closed its generators already.
        connections = None if generator is None else await anext(generator, None)
        if connections is None:
            for other in list(self._by_loop):
                if other is not None and other.is_closed():
                    self._by_loop.pop(other, None)
            generator = self._by_loop[loop] = self._open_connections()
            connections = await anext(generator)
        return connections

    async def _open_connections(self) -> AsyncGenerator[_Connections]:
        """Yield the same connections again and again; close them at the end."""
        transport = _Connections(verify=self._verify, limits=_LIMITS, proxy=self._proxy)
        async with transport as connections:
            while True:
                yield connections


def keep_by_loop(http: httpx.AsyncClient) -> None:
    """Let an HTTP client that has sent nothing keep separate connections for each event loop.

    A proxy of the client's own keeps the connections that it has.
    """
    pool = getattr(http._transport, "_pool", None)
    if type(http._transport) is _Connections and pool is not None and not pool.connections:
        # Copies of an OpenAI client share this transport, and may send to other URLs, with TLS.
        http._transport = EachLoop(pool._ssl_context, None)


def _proxy_of(url: str) -> str | None:
    """Return the environment's proxy for a URL, if any."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    # NO_PROXY may name a host with its port, and names IPv6 addresses without brackets.
    if proxy is None or proxy_bypass(parts.netloc) or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
