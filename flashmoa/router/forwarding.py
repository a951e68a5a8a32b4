"""Read clients' requests (`ForwardedRequest`), send them to engines, and relay the answers."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import anyio
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send
from yarl import URL

from flashmoa._starlette import read_body, while_connected
from flashmoa.errors import FlashMoAError

CHAT = "/v1/chat/completions"
STREAMS = "/prompt_streams"
_EVENT_END = b"\n\n"
_STREAMS = ("text/event-stream", "application/x-ndjson")
_VISIBLE_ASCII = bytes(range(0x21, 0x7F))
_UNFORWARDED_HEADERS = {
    # These concern one connection.
    *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
    "expect",  # The router has read the whole body before it forwards the request.
    # The HTTP client and server set these themselves.
    *("host", "content-length", "content-encoding", "accept-encoding", "date", "server"),
}
_NOT_REACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# Errors of the router's own host, which say nothing about an engine.
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


class RouterError(FlashMoAError):
    """Raised when a router cannot serve a request; its client gets the status and the message."""

    status = 500


class EngineLost(RouterError):
    """Raised when an engine fails before its answer has begun to reach the client.

    Attributes:
        reached: whether the engine may have received the request, and may have crashed on it.
    """

    status = 502

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        super().__init__(f"the engine is gone: {reason}; send the request again")
        self.reached = reached


class LimitReached(RouterError):
    """Raised when the router's host has no file descriptors, ports or memory for a request."""

    status = 503

    def __init__(self, limit: str | None) -> None:
        super().__init__(
            f"the router has reached a limit of its host: {limit}; raise it (`ulimit -n` for open "
            "files), or send fewer requests at a time"
        )


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request, with the forwarded headers, in lower case.

    Attributes:
        path: the decoded path.
        target: the path and the query as the client sent them, in ASCII.
    """

    method: str
    path: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def api_key(self) -> dict[str, str]:
        """The header with the client's API key, for questions on the client's behalf."""
        return {k: v for k, v in self.headers.items() if k == "authorization"}


def select_forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are forwarded, which include the API key."""
    return {k: v for k, v in headers.items() if k.lower() not in _UNFORWARDED_HEADERS}


Handler = Callable[[ForwardedRequest], Awaitable[Response]]


def make_application(routes: Sequence[Route], lifespan: Lifespan[Starlette]) -> Starlette:
    """Return a server that reports every error as JSON."""
    errors = (HTTPException, RouterError, RecursionError, ClientDisconnect)
    handlers = dict.fromkeys(errors, _answer_error)
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    # A redirect would name the Host header's server, and fails for a query that is not UTF-8.
    app.router.redirect_slashes = False
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RouterError):
        return make_error_response(error.status, str(error))
    if isinstance(error, HTTPException):
        unknown = f"the router has no {request.method} {request.scope['path']}"
        message = error.detail if error.status_code == 413 else f"{unknown}; ask an engine itself"
        return make_error_response(error.status_code, message)
    if isinstance(error, RecursionError):
        message = "the body nests lists and objects too deeply for the router; flatten it"
        return make_error_response(400, message)
    return Response(status_code=499)  # The client has disconnected and reads no answer.


def make_route(path: str, handler: Handler, max_body_bytes: int, *methods: str) -> Route:
    """Return a route whose requests ``handler`` answers while their clients are connected."""

    async def endpoint(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        # Not ``request.url``, which contains the Host header that the client sent.
        scope = request.scope
        path, query = scope["raw_path"], scope["query_string"]
        if not path.startswith(b"/"):  # Appended to an engine's URL, it could name another host.
            raise HTTPException(404)
        # Some web servers accept other bytes; every engine accepts visible ASCII.
        target = quote(path + b"?" + query if query else path, safe=_VISIBLE_ASCII)
        headers = select_forwarded_headers(request.headers)
        call = ForwardedRequest(request.method, scope["path"], target, headers, body)
        async with while_connected(request):
            return await handler(call)
        return Response(status_code=499)

    return Route(path, endpoint, methods=list(methods))


def parse_object(text: str | bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object in ``text``; ``{}`` for another text, which engines then refuse."""
    try:
        value = json.loads(text if isinstance(text, str) else bytes(text).decode())
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def make_error_response(status: int, message: str, code: str | None = None) -> Response:
    """Return an error of the router in the format of the engines' errors."""
    # In ASCII, so that any string can be encoded.
    content = json.dumps({"error": {"message": message, "code": code or str(status)}})
    return Response(content, status, media_type="application/json")


class AnswerObserver:
    """Reads an answer while the router relays it."""

    def receive(self, content: bytes) -> None:
        """Process the next piece of a stream, or a whole successful answer."""

    def end(self, ending: str) -> None:
        """Process the end of the answer: ``answered``, ``refused``, ``left`` or ``lost``."""


class Connections:
    """Sends requests to engines with aiohttp. Httpx would take most of the router's own time.

    Each request has a connection of its own: SGLang closes an idle connection, or one that has
    answered with status 500, without notice, and a request sent at that moment would be lost.
    """

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.counted = CollectorRegistry()
        about, labels = "Requests by engine and ending", ["engine", "ending"]
        self._endings = Counter("flashmoa_router_requests", about, labels, registry=self.counted)

    async def ask(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        seconds: float = 5.0,
    ) -> Response | None:
        """Send a small request of the router's own. Return ``None`` if no answer comes in time.

        Raises: EngineLost or LimitReached if there will be no answer.
        """
        with anyio.move_on_after(seconds):
            answer, content = await self._send("POST" if body else "GET", url, headers, body or b"")
            answer.close()
            return Response(content, answer.status)
        return None

    async def read_lines(
        self, url: str, headers: Mapping[str, str], receive: Callable[[Sequence[bytes]], None]
    ) -> int:
        """Pass the whole lines of a channel to ``receive`` until it ends. Return its status.

        Raises: EngineLost if the engine does not answer, or breaks off; LimitReached.
        """
        answer, content = await self._send("GET", url, headers, b"")
        with closing(answer):
            if content is None:
                rest = b""
                with _engine_lost(answer.url):
                    async for piece in answer.content.iter_any():
                        *lines, rest = (rest + piece).split(b"\n")
                        receive(lines)
            return answer.status

    async def forward(
        self,
        call: ForwardedRequest,
        engine: str,
        observer: AnswerObserver | None = None,
        stack: AsyncExitStack | None = None,
    ) -> Response:
        """Return the engine's whole answer, or a stream that relays it to the client.

        If the client leaves, the engine's request is aborted. ``stack`` is closed when the answer
        has ended.

        Raises: EngineLost or LimitReached if there is no answer.
        """
        observer = observer or AnswerObserver()

        def end(ending: str) -> None:
            self._endings.labels(engine, ending).inc()
            observer.end(ending)

        async with stack or AsyncExitStack() as stack:
            try:
                url = engine + call.target
                answer, content = await self._send(call.method, url, call.headers, call.body)
            except BaseException as error:
                unsent = "refused" if isinstance(error, LimitReached) else "left"
                end("lost" if isinstance(error, EngineLost) else unsent)
                raise
            stack.callback(answer.close)
            if content is None:
                return _RelayedStream(answer, observer.receive, end, stack.pop_all())
            if answer.ok:
                observer.receive(content)
            end("answered" if answer.ok else "refused")
            return Response(content, answer.status, select_forwarded_headers(answer.headers))

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Return an answer, which the caller closes, and its content; ``None`` for a stream."""
        target = URL(url, encoded=True)
        with _engine_lost(target):
            answer = await self._http.request(
                method, target, headers=headers, data=body or None, allow_redirects=False
            )
            is_stream = answer.content_type in _STREAMS
            return answer, None if is_stream else await answer.read()


@contextmanager
def _engine_lost(url: URL) -> Generator[None]:
    """Raise EngineLost, or LimitReached, in place of aiohttp's errors."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        if isinstance(error, OSError) and error.errno in _LIMITS:
            raise LimitReached(error.strerror) from error
        raise EngineLost(
            f"{url.origin()}: {error or type(error).__name__}",
            reached=not isinstance(error, _NOT_REACHED),
        ) from error


@asynccontextmanager
async def open_connections() -> AsyncGenerator[Connections]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_make_probed_socket)
    async with aiohttp.ClientSession(
        connector=connector,
        # The router's clients decide how long they wait for an answer.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        auto_decompress=False,
        # The client's own headers are forwarded instead.
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as http:
        yield Connections(http)


def _make_probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that notices within half a minute that its peer's host has vanished.

    While an answer takes long, probes notice it; while a request is unacknowledged, a limit does.
    """
    seconds = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
    probed = socket.socket(*address[:3])
    probed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in seconds.items():
        if (option := getattr(socket, name, None)) is not None:
            probed.setsockopt(socket.IPPROTO_TCP, option, value)
    return probed


class _RelayedStream(StreamingResponse):
    """Relays a stream to a client, and releases everything even if the client never reads it."""

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        receive: Callable[[bytes], None],
        end: Callable[[str], None],
        stack: AsyncExitStack,
    ) -> None:
        self._pieces = self._read(answer, receive)
        super().__init__(self._pieces, answer.status, select_forwarded_headers(answer.headers))
        self._end = end
        self._stack = stack
        self._ending = "left"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(Request(scope, receive)):
                await self.stream_response(send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._pieces.aclose()
                self._end(self._ending)
                await self._stack.aclose()

    async def _read(
        self, answer: aiohttp.ClientResponse, receive: Callable[[bytes], None]
    ) -> AsyncGenerator[bytes]:
        piece = _EVENT_END
        try:
            async for piece in answer.content.iter_any():
                receive(piece)
                yield piece
            self._ending = "answered"
        except (aiohttp.ClientError, TimeoutError) as error:
            self._ending = "lost"
            # The engine may have sent an incomplete event.
            if not piece.endswith(_EVENT_END):
                yield _EVENT_END
            message = str(EngineLost(str(error) or type(error).__name__))
            event = json.dumps({"error": {"message": message, "code": "502"}})
            yield f"data: {event}\n\n".encode()
