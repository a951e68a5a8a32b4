"""The bodies of requests for answers in OpenAI's interface, as its client encodes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def change_body(content: bytes, body: Mapping[str, Any], changed: Mapping[str, Any]) -> bytes:
    """Return the JSON of ``changed``, as far as possible without encoding a prompt once more.

    Args:
        content: the JSON of ``body``.
        body: the fields of a request.
        changed: the same values but for those that are to be changed, and more fields.
    """
    added = {name: value for name, value in changed.items() if name not in body}
    replaced: set[str] = {name for name in body if changed[name] is not body[name]}
    is_made_stream = replaced == {"stream"} and (body["stream"], changed["stream"]) == (False, True)
    # If it is there once, it is the body's own: quotes in texts are escaped.
    if is_made_stream and content.count(b'"stream":false') == 1:
        content, replaced = content.replace(b'"stream":false', b'"stream":true'), set[str]()
    if added and not replaced:
        return content.rstrip().removesuffix(b"}") + b"," + _encode(added).removeprefix(b"{")
    return _encode(changed)


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, which JSON can have only as an escape.
        return json.dumps(body, separators=(",", ":")).encode()


def as_stream(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the body of a request for a chat completion as that of one for a stream.

    ``None`` for one that asks for a stream, and for what streams do not carry: several answers,
    whose texts nobody gets as they arrive; log-probabilities, of which SGLang's streams lack those
    of tokens without text; sound; and what servers return on request besides the text. Also for
    one with ``stream_options``: many servers refuse them without a stream.
    """
    has_text_only = (body.get("modalities") or ["text"]) == ["text"] and not body.get("audio")
    is_one = not body.get("stream") and (body.get("n") or 1) == 1 and has_text_only
    has_options = body.get("stream_options") is not None
    if not is_one or has_options or any(map(_is_only_whole, body.items())):
        return None
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _is_only_whole(field: tuple[str, Any]) -> bool:
    name, value = field
    is_asked = value is not None and value is not False
    return is_asked and (name.startswith("return_") or name.endswith("logprobs"))
