"""Requests from a router's clients: their routes, their bodies, and the router's own answers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self, cast
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from flashmoa._starlette import while_connected
from flashmoa.router.errors import (
    AllEnginesRefused,
    BadRequest,
    BodyTooLarge,
    EngineLost,
    RouterError,
)

CHAT = "/v1/chat/completions"
GENERATE = "/generate"
STREAMS = "/prompt_streams"
# Requests with a prompt. The policy decides where they go.
ROUTED = (
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    GENERATE,
    "/prefill_only",
    STREAMS,
)
# Any engine can answer these.
ANYWHERE = ("/render", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
# Repeating these changes nothing (RFC 9110 §9.2.2).
_IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
# Appends are numbered: an engine that already has one says so and does not add it again.
_NUMBERED = re.compile(r"/prompt_streams/[^/]+/(append|keep_alive)")
_COMPUTING = frozenset({*ROUTED, *ANYWHERE})
# Both loggers write a line for each request, with its path.
_REQUEST_LOGGERS = ("httpx", "uvicorn.access")
# Python parses this much nesting without overflowing its stack, wherever on the stack it starts.
_MAX_NESTING = 200
_TOO_DEEP = f"a body may have at most {_MAX_NESTING} lists and objects within each other"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_ASCII_VISIBLE = re.compile(rb"[^\x21-\x7e]")
_NOT_PASSED_ON = {
    # These concern one connection.
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    # The body has arrived already.
    "expect",
    # The HTTP client and server write these themselves.
    "host",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "date",
    "server",
}


class Repeat(Enum):
    """When a request whose connection broke is sent to the same engine once more."""

    ALWAYS = "always"
    # The engine may have closed a kept connection before the request reached it. If the request
    # did reach the engine, repeating it costs computing, or a stream that expires.
    UNANSWERED = "if it was lost on a connection that had been used before"
    NEVER = "never"


def repeat_rule(method: str, path: str) -> Repeat:
    """Return when a request to ``path`` may be sent a second time."""
    if method in _IDEMPOTENT or _NUMBERED.fullmatch(path):
        return Repeat.ALWAYS
    return Repeat.UNANSWERED if path in _COMPUTING else Repeat.NEVER


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request as the router passes it on.

    Attributes:
        path: the decoded path, by which it was routed.
        target: the path and the query as the client sent them, in ASCII.
    """

    method: str
    path: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def repeat(self) -> Repeat:
        """Return when it may be sent a second time."""
        return repeat_rule(self.method, self.path)

    @property
    def api_key(self) -> dict[str, str]:
        """Return the header with the client's API key, or nothing.

        The router asks engines under this header, so that it acts with the client's rights only.
        """
        found = {name.lower(): value for name, value in self.headers.items()}
        return {"authorization": found["authorization"]} if "authorization" in found else {}

    @classmethod
    def from_client(cls, request: Request, body: bytes) -> Self:
        """Return the request to forward for what a client sent."""
        path: str = request.scope["path"]
        # The request's URL would not do: the client's Host header is a part of it.
        raw: bytes = request.scope.get("raw_path") or quote(path).encode()
        if query := request.scope["query_string"]:
            raw += b"?" + query
        # Some web servers accept other bytes, but every engine accepts these.
        target = _NOT_ASCII_VISIBLE.sub(lambda found: b"%%%02X" % found[0][0], raw).decode()
        return cls(request.method, path, target, passed_on(request.headers), body)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are passed on, the API key among them."""
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}


Handler = Callable[[Request, ForwardedRequest], Awaitable[Response]]


async def respond(request: Request, max_body_bytes: int, handler: Handler) -> Response:
    """Read a client's request, have it handled, and answer with the router's error if that fails.

    The handler is cancelled when the client disconnects.
    """
    try:
        body = await _read_body(request, max_body_bytes)
        async with while_connected(request):
            return await handler(request, ForwardedRequest.from_client(request, body))
    except AllEnginesRefused as error:
        return Response(error.content, error.status, media_type=error.media_type)
    except EngineLost as error:
        return refusal(error.status, f"the engine is gone: {error}")
    except RouterError as error:
        return refusal(error.status, str(error))
    except ClientDisconnect:
        pass
    return Response(status_code=499)  # The client is gone and reads no answer.


async def _read_body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is larger than {max_bytes} bytes; send a smaller request")
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``, or an empty one if it has none."""
    try:
        return _parsed_object(body)
    except RecursionError:
        return {}


def request_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request, or an empty one: engines report malformed bodies.

    Raises: BadRequest for what would fail in the router itself: text that cannot be encoded, and
    values that are nested too deeply.
    """
    try:
        value = _parsed_object(body)
    except RecursionError:
        raise BadRequest(_TOO_DEEP) from None
    if body.count(b"[") + body.count(b"{") > _MAX_NESTING and _is_too_deep(value):
        raise BadRequest(_TOO_DEEP)
    if _SURROGATE.search(body) and _has_lone_surrogate(value):
        raise BadRequest("a string has one half of a surrogate pair, which no text can contain")
    return value


def _parsed_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode())
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [inner for outer in level for inner in _nested(outer)]
        if not level:
            return False
    return True


def _nested(value: Any) -> list[object]:
    """Return the lists and objects directly within one."""
    values: Any = cast("dict[str, Any]", value).values() if isinstance(value, dict) else value
    return [one for one in values if isinstance(one, dict | list)]


def _has_lone_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def json_answer(value: object, status: int = 200) -> Response:
    """Return a JSON answer, written in ASCII so that any text in it can be encoded."""
    return Response(json.dumps(value), status, media_type="application/json")


def refusal(status: int, message: str, more: Mapping[str, Any] | None = None) -> Response:
    """Return an error of the router's own, in the form in which engines answer errors."""
    return json_answer({"error": {"message": message, "code": status, **(more or {})}}, status)


def hide_stream_ids() -> None:
    """Keep the ids of prompt streams out of the logs of HTTP clients and servers.

    Anyone who knows the id of a prompt stream can use the stream.
    """
    for name in _REQUEST_LOGGERS:
        logging.getLogger(name).addFilter(_names_no_stream)


def _names_no_stream(record: logging.LogRecord) -> bool:
    return f"{STREAMS}/" not in record.getMessage()
