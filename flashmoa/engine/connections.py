"""Send HTTP requests to an engine, and turn their failures into FlashMoA's exceptions."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import cache
from math import isfinite
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakValueDictionary

import anyio
import httpx
from anyio.lowlevel import RunVar
from pydantic import BaseModel, ValidationError

from flashmoa import errors
from flashmoa.engine.generation import is_event_stream, read_events
from flashmoa.engine.refusals import bad_answer, make_refusal, translate_errors

Answer = TypeVar("Answer", bound=BaseModel)

# SGLang closes a connection that was idle for 5 s (``SGLANG_TIMEOUT_KEEP_ALIVE``). A request that
# is sent at that moment is lost, so the client closes idle connections long before.
KEPT_SECONDS = 2.0
# Few idle connections are kept, since httpx checks each of them at each request. The number in use
# has no limit here; engines limit it.
CONNECTIONS = httpx.Limits(
    max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEPT_SECONDS
)
_CONNECT_SECONDS = 10.0
# What an engine's HTTP process does by itself, such as rendering a prompt, takes it milliseconds,
# also while the engine is busy. What takes longer than this comes too late for most links.
SOON_SECONDS = 2.0
# How many of these requests an engine gets at once: its HTTP process answers them one by one, so
# that of more the last ones would take long although nothing is wrong with it.
_MOST_AT_ONCE = 8
# For how long an engine that took longer is not asked again, and how many of them are remembered.
_SILENT_SECONDS = 10.0
_MOST_SILENT = 1000
# Until when engines are not asked again, by their URLs and by ``time.monotonic()``.
_silent_until: dict[str, float] = {}
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


def check_ttl(seconds: float) -> float:
    """Return ``seconds``. Raises: ValueError if they are not positive and finite."""
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError(f"stream_ttl_seconds must be a positive number, not {seconds!r}")
    return seconds


def make_http_client(
    url: str, api_key: str | None, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None
) -> httpx.AsyncClient:
    """Make the HTTP client of one engine; ``timeout`` in seconds."""
    all_headers = dict(headers or {})
    if api_key:
        all_headers["Authorization"] = f"Bearer {api_key}"
    if not isinstance(timeout, httpx.Timeout):
        timeout = httpx.Timeout(timeout, connect=_CONNECT_SECONDS)
    transport = _EachLoop(url)
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


class _EachLoop(httpx.AsyncBaseTransport):
    """Keeps connections of its own for each event loop that requests are sent in.

    A connection is of no use outside the loop that opened it, and cannot even be closed there. So
    an async generator holds a loop's connections: the loop of ``asyncio.run``, for instance, closes
    all its generators when it ends.

    Args:
        url: the engine's.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._verify = verification(url)
        self._by_loop: dict[asyncio.AbstractEventLoop, AsyncGenerator[_Connections]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await (await self._connections()).handle_async_request(request)

    async def aclose(self) -> None:
        own = self._by_loop.pop(asyncio.get_running_loop(), None)
        # Loops that still run in other threads close theirs now.
        self._by_loop.clear()
        if own is not None:
            await own.aclose()

    async def _connections(self) -> _Connections:
        loop = asyncio.get_running_loop()
        held = self._by_loop.get(loop)
        # A loop that is ending may have closed its generators already.
        connections = None if held is None else await anext(held, None)
        if connections is None:
            for other in list(self._by_loop):
                if other.is_closed():
                    self._by_loop.pop(other, None)
            held = self._by_loop[loop] = self._hold_connections()
            connections = await anext(held)
        return connections

    async def _hold_connections(self) -> AsyncGenerator[_Connections]:
        """Yield the same connections again and again; close them in the end."""
        proxy = _proxy_of(self._url)
        transport = _Connections(verify=self._verify, limits=CONNECTIONS, proxy=proxy)
        async with transport as connections:
            while True:
                yield connections


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, if any."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    # A host of NO_PROXY may have a port; that of an IPv6 address is compared without brackets.
    if proxy is None or proxy_bypass(parts.netloc) or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


async def send_request(
    http: httpx.AsyncClient,
    url: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
) -> bytes:
    """Send a request, and return the body of the answer.

    Args:
        body: the fields of the request's body; those that are ``None`` are not sent.

    Raises: EngineError if there is no answer, or the answer is an error.
    """
    with translate_errors(url):
        json = None if body is None else _without_none(body)
        response = await http.request(method, path, json=json)
    if response.is_error:
        raise make_refusal(response, url)
    return response.content


async def flush_cache(http: httpx.AsyncClient, url: str, wait_seconds: float) -> None:
    """Empty an engine's radix cache; see :meth:`EngineClient.flush_cache`."""
    try:
        await send_request(http, url, "POST", f"/flush_cache?timeout={wait_seconds}")
    except errors.MalformedRequest as error:
        # SGLang refuses with the status of a wrong request what comes too early.
        raise errors.RequestRefused(
            f"{url} was not idle for {wait_seconds:g} s, so that its cache was not emptied "
            f"({error}). Try again once its requests have ended.",
            error.status,
            error.code,
        ) from error


async def ask(
    http: httpx.AsyncClient,
    url: str,
    method: str,
    path: str,
    answer: type[Answer],
    body: Mapping[str, Any] | None = None,
) -> Answer:
    """Send a request, and return the answer as a value of the type ``answer``.

    Raises: EngineError, see :func:`send_request`; BadAnswer if the answer is of another form.
    """
    content = await send_request(http, url, method, path, body)
    try:
        return answer.model_validate_json(content)
    except ValidationError as error:
        raise bad_answer(url, path) from error


class _Turns:
    """The requests of an event loop to one engine that are limited by :func:`answering_soon`."""

    def __init__(self) -> None:
        self.free = anyio.Semaphore(_MOST_AT_ONCE)
        self.answers = 0


_turns: RunVar[WeakValueDictionary[str, _Turns]] = RunVar("flashmoa_turns")


@asynccontextmanager
async def answering_soon(url: str) -> AsyncGenerator[None]:
    """Limit a request for which nobody should wait long to :data:`SOON_SECONDS`, once it is sent.

    It waits until few others are on their way to the engine. An engine that answers none of them
    by then is not asked again for a few seconds: each request would hold a connection, and the
    links that wait for it.

    Raises: EngineTimeout if the engine does not answer by then, or has not answered lately.
    """
    of_loop = _turns.get(None)
    if of_loop is None:
        _turns.set(of_loop := WeakValueDictionary())
    turns = of_loop.setdefault(url, _Turns())
    async with turns.free:
        if time.monotonic() < _silent_until.get(url, 0.0):
            raise errors.EngineTimeout(
                f"{url} did not answer in time a moment ago, so it is not asked to prepare prompts "
                f"for {_SILENT_SECONDS:g} s; see the engine's log"
            )
        answers_before = turns.answers
        try:
            with anyio.fail_after(SOON_SECONDS):
                yield
        except TimeoutError as error:
            if turns.answers == answers_before:
                _note_silence(url)
            if isinstance(error, errors.EngineTimeout):
                raise
            raise errors.EngineTimeout(
                f"{url} did not answer within {SOON_SECONDS:g} s; see the engine's log"
            ) from error
        except (errors.RequestRefused, errors.BadAnswer, errors.PluginMissing):
            turns.answers += 1
            raise
        turns.answers += 1
        _silent_until.pop(url, None)


def _note_silence(url: str) -> None:
    _silent_until.pop(url, None)
    if len(_silent_until) >= _MOST_SILENT:
        del _silent_until[next(iter(_silent_until))]
    _silent_until[url] = time.monotonic() + _SILENT_SECONDS


@asynccontextmanager
async def stream_events(
    http: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
    """Send a request and yield the events of its answer. Leaving the context aborts it.

    Raises: EngineError if there is no answer, or the answer is an error or not a stream of events.
    """
    async with AsyncExitStack() as stack:
        # Not around the yield: what the user of the events raises is not the engine's fault.
        with translate_errors(url):
            sending = http.stream("POST", path, json=_without_none(body))
            response = await stack.enter_async_context(sending)
            if response.is_error:
                await response.aread()
                raise make_refusal(response, url)
        if not is_event_stream(response):
            raise bad_answer(url, path)
        yield _read_events(response, url)


async def _read_events(response: httpx.Response, url: str) -> AsyncGenerator[dict[str, Any]]:
    with translate_errors(url):
        async with aclosing(read_events(response)) as events:
            async for event in events:
                yield event


def _without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
