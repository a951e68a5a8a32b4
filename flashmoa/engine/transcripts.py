"""Write a chat request as one text that may be cut anywhere, and read it back (``encode``).

Links cut prompts at the texts that are still being written. Where a server cannot render messages
as text, a link's prompt is this transcript instead: what precedes the cut is again a chat request,
whose last message is the part of a message that is certain so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa import errors

# Control characters, which JSON escapes: at the start, before each message, before its content, and
# between the parts of a content that is a list.
_START, _MESSAGE, _CONTENT, _PART = "\x03", "\x00", "\x01", "\x02"


def encode(messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
    """Return a chat request as text. Contents are in it as they are, everything else is JSON.

    Args:
        fields: the request's other fields.

    Raises: MalformedRequest if a message has a content other than text.
    """
    return _START + json.dumps(dict(fields)) + "".join(_encode(message) for message in messages)


def is_transcript(text: str) -> bool:
    """Return whether a text is a transcript, or the beginning of one."""
    return text.startswith(_START)


def decode(transcript: str) -> dict[str, Any]:
    """Return the body of the chat request that a transcript's beginning stands for.

    A message that is cut before its content is left out, and so are the last ones without text.

    Raises: ValueError if it is no transcript, or is cut in the fields before its first message.
    """
    head, *rest = transcript.removeprefix(_START).split(_MESSAGE)
    messages = [_decode(*one.split(_CONTENT, 1)) for one in rest if _CONTENT in one]
    while messages and not _has_text(messages[-1]["content"]):
        del messages[-1]
    return {**json.loads(head), "messages": messages}


def _encode(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    fields = {name: value for name, value in message.items() if name != "content"}
    kind, text = "text", content
    if content is None:
        kind, text = "none", ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        parts = cast("Sequence[Any]", content)
        kind, text = "parts", _PART.join(_text_of(part) for part in parts)
    if not isinstance(text, str) or _MESSAGE in text:
        raise _not_text()
    return f"{_MESSAGE}{json.dumps([kind, fields])}{_CONTENT}{text}"


def _decode(head: str, text: str) -> dict[str, Any]:
    kind, fields = json.loads(head)
    content: Any = text
    if kind == "none":
        content = None
    elif kind == "parts":
        content = [{"type": "text", "text": part} for part in text.split(_PART)]
    return {**fields, "content": content}


def _has_text(content: Any) -> bool:
    if isinstance(content, str) or content is None:
        return bool(content)
    return any(part["text"] for part in content)


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, Any]", part)
        if fields.get("type") == "text" and isinstance(fields.get("text"), str):
            return fields["text"]
    raise _not_text()


def _not_text() -> errors.MalformedRequest:
    text = "only text can be prefilled ahead; messages with images are sent as usual"
    return errors.MalformedRequest(text, 400, "malformed")
