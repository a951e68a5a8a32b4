"""User messages that follow each other as one, for templates that refuse more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

_BETWEEN = "\n\n"


def merge_users(messages: Sequence[Any]) -> list[Any]:
    """OpenAI messages with each run of user messages of text made one.

    Names are lost, since there can be only one; ``add_name_prefixes`` keeps them in the text.
    """
    merged: list[Any] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is not None and _is_text_of_user(before) and _is_text_of_user(message):
            content = f"{before['content']}{_BETWEEN}{message['content']}"
            merged[-1] = {"role": "user", "content": content}
        else:
            merged.append(message)
    return merged


def _is_text_of_user(message: Any) -> bool:
    fields = cast("dict[str, Any]", message)
    return fields.get("role") == "user" and isinstance(fields.get("content"), str)
