"""Bodies of requests to a router, and its own refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from flashmoa.errors import FlashMoAError

# What Python nests without reaching the end of its stack, wherever it stands on it.
_MOST_NESTED = 200
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class TooLarge(FlashMoAError):
    """Raised when a request's body is larger than the router admits."""


class BadBody(FlashMoAError, ValueError):
    """Raised when a request's body is JSON that no engine would take."""


async def read_body(request: Request, most: int) -> bytes:
    """A request's body. Raises: TooLarge; ClientDisconnect."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise TooLarge(f"a request has at most {most} bytes")
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object, or nothing."""
    try:
        return _object(body)
    except RecursionError:
        return {}


def request_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request, or nothing: what is wrong with it is for an engine to say.

    Raises: BadBody for what would be wrong in the router itself: text that cannot be encoded, and
    values that are nested too deeply.
    """
    try:
        value = _object(body)
    except RecursionError:
        raise BadBody(_TOO_DEEP) from None
    if body.count(b"[") + body.count(b"{") > _MOST_NESTED and _is_deep(value):
        raise BadBody(_TOO_DEEP)
    if _SURROGATE.search(body) and _has_lone_surrogate(value):
        raise BadBody("a string has half of a surrogate pair, which no text can have")
    return value


_TOO_DEEP = f"a body has at most {_MOST_NESTED} lists and objects within each other"


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode())
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return False
    return True


def _within(value: Any) -> list[object]:
    """The lists and objects in one."""
    values: Any = cast("dict[str, Any]", value).values() if isinstance(value, dict) else value
    return [one for one in values if isinstance(one, dict | list)]


def _has_lone_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def json_answer(value: object, status: int = 200) -> Response:
    """A JSON answer. Whatever text is in it can be encoded, as all of it is written in ASCII."""
    return Response(json.dumps(value), status, media_type="application/json")


def refusal(status: int, message: str, more: Mapping[str, Any] | None = None) -> Response:
    """The router's own no, as engines say it."""
    return json_answer({"error": {"message": message, "code": status, **(more or {})}}, status)
