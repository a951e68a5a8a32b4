"""Read the requests of a router's clients (`ForwardedRequest`), and answer errors to them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from flashmoa._starlette import while_connected
from flashmoa.router.errors import AllEnginesRefused, BodyTooLarge, EngineLost, RouterError

CHAT = "/v1/chat/completions"
GENERATE = "/generate"
STREAMS = "/prompt_streams"
# The policy decides to which engine these requests are sent, because they have a prompt.
POLICY_ROUTES = (
    *(CHAT, GENERATE, STREAMS, "/prefill_only", "/v1/completions", "/v1/embeddings"),
    *("/v1/classify", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
# Any engine can answer these requests.
ANY_ENGINE_ROUTES = ("/render", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
# Repeating a request with one of these methods has no further effect (RFC 9110 §9.2.2).
_IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})
# Appends are numbered, so that an engine ignores one that it has received before.
_IDEMPOTENT_POSTS = re.compile(r"/prompt_streams/[^/]+/(append|keep_alive)")
_COMPUTING_POSTS = frozenset({*POLICY_ROUTES, *ANY_ENGINE_ROUTES})
# Both loggers write the path of each request.
_REQUEST_LOGGERS = ("httpx", "uvicorn.access")
_VISIBLE_ASCII = bytes(range(0x21, 0x7F))
# SGLang's own name; the plugin reads it on every route.
_RANK_HEADER = "x-data-parallel-rank"
_UNFORWARDED_HEADERS = {
    # These concern one connection.
    *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
    "expect",  # The router has read the whole body before it forwards the request.
    # The HTTP client and server write these themselves.
    *("host", "content-length", "content-encoding", "accept-encoding", "date", "server"),
}


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request in the form in which the router forwards it to an engine.

    Attributes:
        path: decoded path.
        target: the path and the query as the client sent them, in ASCII.
        headers: those of the client that are forwarded; their names are in lower case.
    """

    method: str
    path: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be sent twice: at worst an engine computes, or keeps a stream, in vain."""
        return (
            self.method in _IDEMPOTENT_METHODS
            or self.path in _COMPUTING_POSTS
            or _IDEMPOTENT_POSTS.fullmatch(self.path) is not None
        )

    @property
    def api_key(self) -> dict[str, str]:
        """The header with the client's API key; empty if there is none.

        The router sends it with its own requests to engines on behalf of the client, so that it has
        only the client's rights.
        """
        return {name: key for name, key in self.headers.items() if name == "authorization"}

    def on_rank(self, rank: int | None) -> ForwardedRequest:
        """Return the request for a data-parallel rank; ``None`` leaves the choice as it is."""
        if rank is None:
            return self
        return replace(self, headers={**self.headers, _RANK_HEADER: str(rank)})

    @classmethod
    def from_client(cls, request: Request, body: bytes) -> Self:
        """Build the request to forward from a client's request and its body."""
        # ``request.url`` would be wrong, because it contains the Host header that the client sent.
        raw: bytes = request.scope["raw_path"]
        if query := request.scope["query_string"]:
            raw += b"?" + query
        # Some web servers accept other bytes, but every engine accepts visible ASCII.
        target = quote(raw, safe=_VISIBLE_ASCII)
        headers = select_forwarded_headers(request.headers)
        return cls(request.method, request.scope["path"], target, headers, body)


def select_forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are forwarded, which include the API key."""
    return {
        name: value for name, value in headers.items() if name.lower() not in _UNFORWARDED_HEADERS
    }


Handler = Callable[[ForwardedRequest], Awaitable[Response]]


def make_application(routes: Sequence[Route], lifespan: Lifespan[Starlette]) -> Starlette:
    """Return a server that refuses what it has no route for as it reports its other errors.

    Like SGLang, it lets web pages of every origin send requests: a key is needed all the same.
    """
    anyone: dict[str, Any] = {
        "allow_origins": ["*"],
        "allow_methods": ["*"],
        "allow_headers": ["*"],
    }
    return Starlette(
        routes=routes,
        middleware=[Middleware(CORSMiddleware, allow_credentials=True, **anyone)],
        exception_handlers={HTTPException: _answer_unrouted},
        lifespan=lifespan,
    )


async def _answer_unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"the router has no {request.method} {request.scope['path']}; ask an engine itself"
    answer = make_error_response(error.status_code, message)
    answer.headers.update(error.headers or {})
    return answer


def make_endpoint(
    handler: Handler, max_body_bytes: int
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for Starlette that reads a request and lets ``handler`` answer it.

    It answers the errors of the router as JSON, and cancels the handler when the client
    disconnects.
    """

    async def endpoint(request: Request) -> Response:
        try:
            body = await _read_body(request, max_body_bytes)
            async with while_connected(request):
                return await handler(ForwardedRequest.from_client(request, body))
        except AllEnginesRefused as error:
            return error.response
        except EngineLost as error:
            message = f"the engine is gone: {error}; send the request again"
            return make_error_response(error.status, message)
        except RouterError as error:
            return make_error_response(error.status, str(error))
        except RecursionError:
            message = "the body nests lists and objects too deeply for the router; flatten it"
            return make_error_response(400, message)
        except ClientDisconnect:
            pass
        return Response(status_code=499)  # The client has disconnected and reads no answer.

    return endpoint


async def _read_body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is larger than {max_bytes} bytes; send a smaller request")
    return bytes(body)


def parse_object(text: str | bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object in ``text``, or an empty one if there is none.

    A malformed body of a request is not an error here, because the engine that gets it reports it.
    """
    try:
        value = json.loads(text if isinstance(text, str) else bytes(text).decode())
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def make_json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response, in ASCII so that any string in it can be encoded."""
    return Response(json.dumps(value), status, media_type="application/json")


def make_error_response(status: int, message: str, code: str | None = None) -> Response:
    """Return an error of the router in the format of the engines' errors."""
    return make_json_response({"error": {"message": message, "code": code or status}}, status)


def hide_stream_ids() -> None:
    """Keep the ids of prompt streams out of the logs of HTTP clients and servers.

    Anyone who knows the id of a prompt stream can use the stream.
    """
    for name in _REQUEST_LOGGERS:
        logging.getLogger(name).addFilter(_has_no_stream_id)


def _has_no_stream_id(record: logging.LogRecord) -> bool:
    return f"{STREAMS}/" not in record.getMessage()
