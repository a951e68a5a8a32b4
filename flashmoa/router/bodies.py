"""Bodies of requests to a router, and its own refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse


class TooLarge(Exception):
    """A request's body is larger than what is let in."""


async def read_body(request: Request, most: int) -> bytes:
    """A request's body. Raises: TooLarge; ClientDisconnect."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise TooLarge(f"a request has at most {most} bytes")
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object, or nothing: what is wrong with a body is for an engine to say."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def refusal(status: int, message: str, more: Mapping[str, Any] | None = None) -> JSONResponse:
    """The router's own no, as engines say it."""
    error = {"message": message, "code": status, **(more or {})}
    return JSONResponse({"error": error}, status_code=status)
