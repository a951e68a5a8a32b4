"""The bodies of requests for answers in OpenAI's interface, as its client encodes them."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic_core import from_json


def read_body(request: Any) -> dict[str, Any] | None:
    """Return the body of a request for an answer; ``None`` for other requests.

    Args:
        request: of httpx or httpx2, for a chat completion or of the Responses API.
    """
    is_chat = request.url.path.endswith("/chat/completions")
    if request.method != "POST" or not (is_chat or is_response(request)):
        return None
    try:
        body = _decode(request.content)
    except (ValueError, RuntimeError):  # RequestNotRead: its body is not there before it is sent.
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def is_response(request: Any) -> bool:
    """Return whether a request for an answer is of the Responses API."""
    return request.url.path.endswith("/responses")


def _decode(content: bytes) -> object:
    try:
        return from_json(content)  # It takes a part of the time.
    except ValueError:  # It takes no halves of surrogate pairs.
        return json.loads(content.decode())
