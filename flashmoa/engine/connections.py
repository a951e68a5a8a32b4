"""HTTP to an engine: its URL, connections, and requests whose failures are our exceptions."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from flashmoa.engine.generation import data_events
from flashmoa.engine.refusals import not_an_engine, refusal, translated
from flashmoa.errors import BadAnswer

# SGLang closes a connection that was idle for 5 s (``SGLANG_TIMEOUT_KEEP_ALIVE``). A request that
# is on its way at that moment is lost, so ours are closed long before.
KEPT_SECONDS = 2.0
# Few are kept, since httpx looks at each idle one for each request; engines decide how many are in
# use at a time.
CONNECTIONS = httpx.Limits(
    max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEPT_SECONDS
)
_CONNECT_SECONDS = 10.0
_LOCAL = "http://127.0.0.1:30000"


def engine_url(base_url: str) -> str:
    """Return an engine's root, given its own URL or its OpenAI one (``.../v1``).

    Raises: ValueError.
    """
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # Unbalanced brackets, or a port that is not a number.
        usable = False
    if not usable:
        raise ValueError(f"{base_url!r} is not an engine's URL; give http://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def self_hosted_url(base_url: str | None) -> str:
    """Return the root of the engine at ``base_url``.

    Without one it is that of ``OPENAI_BASE_URL`` in the environment, else SGLang's default address.
    """
    return engine_url(base_url or os.environ.get("OPENAI_BASE_URL") or _LOCAL)


def http_client(
    url: str, api_key: str | None, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None
) -> httpx.AsyncClient:
    """Make the HTTP client of one engine; ``timeout`` in seconds."""
    sent = dict(headers or {})
    if api_key:
        sent["Authorization"] = f"Bearer {api_key}"
    if not isinstance(timeout, httpx.Timeout):
        timeout = httpx.Timeout(timeout, connect=_CONNECT_SECONDS)
    return httpx.AsyncClient(
        base_url=url,
        headers=sent,
        timeout=timeout,
        limits=CONNECTIONS,
        # Reading the certificates takes 20 ms, in which the event loop stands still.
        verify=url.startswith("https://"),
    )


async def request(
    http: httpx.AsyncClient, url: str, method: str, path: str, body: Mapping[str, Any] | None
) -> bytes:
    """Return the body of an answer; fields of ``body`` that are ``None`` are not sent.

    Raises: EngineError.
    """
    with translated(url):
        response = await http.request(method, path, json=None if body is None else _given(body))
    if response.is_error:
        raise refusal(response, url)
    return response.content


@asynccontextmanager
async def events(
    http: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
    """Send a request and yield the events of its answer. Leaving the context aborts it.

    Raises: EngineError.
    """
    with translated(url):
        async with http.stream("POST", path, json=_given(body)) as response:
            if response.is_error:
                await response.aread()
                raise refusal(response, url)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise BadAnswer(not_an_engine(url, path))
            yield data_events(response)


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
