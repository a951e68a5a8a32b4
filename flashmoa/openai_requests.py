"""Read and change the requests for chat completions that OpenAI's client sends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

# Those of httpx or of httpx2, on which OpenAI's client 3 is built. They share no types.
_Request: TypeAlias = Any


def read_chat_body(request: _Request) -> dict[str, Any] | None:
    """Return the body of a request for a chat completion; ``None`` for other requests."""
    if request.method != "POST" or not request.url.path.endswith("/chat/completions"):
        return None
    try:
        body: object = json.loads(request.content)
    except ValueError:
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def with_body(request: _Request, body: Mapping[str, Any]) -> _Request:
    """Return a request with another JSON body, in the format of OpenAI's client."""
    headers = request.headers.copy()
    headers.pop("content-length", None)
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
        extensions=request.extensions,
    )


def as_stream(request: _Request) -> _Request | None:
    """Return a request for a chat completion as one for a stream.

    ``None`` for other requests, and for one that asks for several answers: nobody gets the text of
    these as it arrives, and OpenAI's client can put them together only if they begin in order.
    """
    body = read_chat_body(request)
    if body is None or body.get("stream") or (body.get("n") or 1) != 1:
        return None
    options: dict[str, Any] = {**(body.get("stream_options") or {}), "include_usage": True}
    return with_body(request, {**body, "stream": True, "stream_options": options})
