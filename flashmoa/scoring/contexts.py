"""Contexts, the candidates that may follow them, and the questions between both; pure."""

from __future__ import annotations

import reprlib
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa.errors import FlashMoAError

Messages = Sequence[Mapping[str, Any]]
# A text, token ids, or messages in OpenAI's format.
Context = str | Sequence[int] | Messages
# A text that continues where the context ends, or token ids.
Candidate = str | Sequence[int]


class CandidateRefused(FlashMoAError, ValueError):
    """Raised when a candidate cannot be scored after its context. The message has the remedy."""


def context_kind(context: Context) -> str:
    """Return ``text``, ``tokens`` or ``messages``.

    Raises: ValueError for anything else, and for a message whose content is neither a text, a list
        of parts nor ``None``.
    """
    if isinstance(context, str):
        return "text"
    items = list(cast("Sequence[object]", context))
    if items and all(isinstance(item, Mapping) for item in items):
        for number, message in enumerate(cast("Messages", items)):
            if not isinstance(content := message.get("content"), str | list | tuple | None):
                raise ValueError(
                    f"message {number} has the content {reprlib.repr(content)}; give a text or a "
                    "list of parts"
                )
        return "messages"
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return "tokens"
    raise ValueError(
        "a context is a text, or a list of messages or of token ids that is not empty, not "
        f"{reprlib.repr(context)}"
    )


def question_item(context: Context, question: str) -> str:
    """Return the text that adds a question to the user's last message, or to a text.

    A text then ends with ``Answer:``.

    Raises: ValueError if the context is token ids, because only the engine could append a text.
    """
    kind = context_kind(context)
    if kind == "tokens":
        raise ValueError(
            "a question cannot follow token ids; give a text or messages, or use score()"
        )
    if kind == "text":
        return f"\n\n{question}\nAnswer:"
    last = cast("Messages", context)[-1]
    is_continued = last.get("role") == "user" and last.get("content")
    return f"\n\n{question}" if is_continued else question


def append_item(context: Context, item: str) -> Context:
    """Return a text, or messages, with an item at the end of the text or of the user's text.

    The plugin does the same for the items of a request.
    """
    if isinstance(context, str):
        return context + item
    *before, last = cast("Messages", context)
    if last.get("role") != "user":
        return [*before, last, {"role": "user", "content": item}]
    content: Any = last.get("content") or ""
    whole = (
        content + item if isinstance(content, str) else [*content, {"type": "text", "text": item}]
    )
    return [*before, {**last, "content": whole}]


def answer_candidate(context: Context, text: str) -> str:
    """Return an answer as a candidate after :func:`question_item`: with a space after a text."""
    return f" {text}" if isinstance(context, str) else text


def option_letters(count: int) -> list[str]:
    """Return a letter for each option. Raises: ValueError for no options, or too many."""
    if not 1 <= count <= 26:
        raise ValueError(
            f"there are letters for 1 to 26 options, not for {count}; give fewer options, ask "
            "about each with select(), or score their texts with score()"
        )
    return list(string.ascii_uppercase[:count])


def choice_question(options: Sequence[str], instruction: str) -> str:
    """Return a question with lettered options. Raises: as :func:`option_letters`."""
    lettered = zip(option_letters(len(options)), options, strict=True)
    return "\n".join([*(f"{letter}. {option}" for letter, option in lettered), instruction])
