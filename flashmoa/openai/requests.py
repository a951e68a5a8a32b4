"""Read the bodies of requests for answers, as OpenAI's client encodes them."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic_core import from_json


def read_body(request: Any) -> dict[str, Any] | None:
    """Return the body of a chat completion or a request of the Responses API, else ``None``.

    Args:
        request: a request of httpx or httpx2.
    """
    is_chat = request.url.path.endswith("/chat/completions")
    if request.method != "POST" or not (is_chat or is_response(request)):
        return None
    try:
        body = _decode(request.content)
    except (ValueError, RuntimeError):  # RequestNotRead: the body is made while it is sent.
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def is_response(request: Any) -> bool:
    """Return whether a request for an answer is of the Responses API."""
    return request.url.path.endswith("/responses")


def _decode(content: bytes) -> object:
    try:
        return from_json(content)  # Several times as fast as ``json``.
    except ValueError:  # It refuses half a surrogate pair.
        return json.loads(content.decode())
