"""Read and change the requests for chat completions that OpenAI's client sends."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

# Those of httpx or of httpx2, on which OpenAI's client 3 is built. They share no types.
_Request: TypeAlias = Any


# The fields that FlashMoA adds to requests, for engines with its plugin.
OWN_FIELDS = frozenset(("prompt_stream_id", "expected_output_tokens"))


def http_module(request: _Request) -> Any:
    """Return httpx or httpx2, whichever a request is of."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def read_chat_body(request: _Request) -> dict[str, Any] | None:
    """Return the body of a request for a chat completion; ``None`` for other requests."""
    if request.method != "POST" or not request.url.path.endswith("/chat/completions"):
        return None
    try:
        body: object = json.loads(request.content)
    except (ValueError, RuntimeError):  # RequestNotRead: its body is not there before it is sent.
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def with_body(request: _Request, body: Mapping[str, Any]) -> _Request:
    """Return a request with another JSON body, in the format of OpenAI's client."""
    headers = request.headers.copy()
    headers.pop("content-length", None)
    try:
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, which JSON can have only as an escape.
        content = json.dumps(body, separators=(",", ":")).encode()
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=content,
        extensions=request.extensions,
    )


def as_stream(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the body of a request for a chat completion as that of one for a stream.

    ``None`` for one that asks for a stream, and for what streams do not carry: several answers,
    whose texts nobody gets as they arrive; log-probabilities, of which SGLang's streams lack those
    of tokens without text; sound; and what servers return on request besides the text. Also for
    one whose ``stream_options`` are none: the server says what is wrong with them.
    """
    options: Any = body.get("stream_options") or {}
    has_text_only = (body.get("modalities") or ["text"]) == ["text"] and not body.get("audio")
    is_one = not body.get("stream") and (body.get("n") or 1) == 1 and has_text_only
    if not is_one or not isinstance(options, dict) or any(map(_is_only_whole, body.items())):
        return None
    return {**body, "stream": True, "stream_options": {**options, "include_usage": True}}


def _is_only_whole(field: tuple[str, Any]) -> bool:
    name, value = field
    is_asked = value is not None and value is not False
    return is_asked and (name.startswith("return_") or name.endswith("logprobs"))
