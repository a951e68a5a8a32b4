"""The contexts of scores, and the questions that are added to them."""

from __future__ import annotations

import reprlib
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

Messages = Sequence[Mapping[str, Any]]
# A text, token ids, or messages in OpenAI's format.
Context = str | Sequence[int] | Messages
# A text that continues where the context ends, or the tokens themselves.
Candidate = str | Sequence[int]

_LETTERS = string.ascii_uppercase


def context_kind(context: Context) -> str:
    """Return ``text``, ``tokens`` or ``messages``. Raises: ValueError for anything else."""
    if isinstance(context, str):
        return "text"
    items = list(cast("Sequence[object]", context))
    if items and all(isinstance(item, Mapping) for item in items):
        return "messages"
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return "tokens"
    raise ValueError(
        "a context is a text, or a list of messages or of token ids that is not empty, not "
        f"{reprlib.repr(context)}"
    )


def question_item(context: Context, question: str) -> str:
    """Return the text that adds a question to the user's last message, or to a text.

    A text then ends with ``Answer:``. Raises: ValueError if the context is token ids, as only the
    engine could add a text to them.
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


def answer_candidate(context: Context, text: str) -> str:
    """Return an answer as a candidate after :func:`question_item`: with a space after a text."""
    return f" {text}" if isinstance(context, str) else text


def option_letters(count: int) -> list[str]:
    """Return a letter for each option. Raises: ValueError if there are too many or no options."""
    if not 1 <= count <= len(_LETTERS):
        raise ValueError(
            f"there are letters for 1 to {len(_LETTERS)} options, not for {count}; give fewer "
            "options, ask about each with select(), or score their texts with score()"
        )
    return list(_LETTERS[:count])


def choice_question(options: Sequence[str], instruction: str) -> str:
    """Return a question with lettered options. Raises: as :func:`option_letters`."""
    lettered = zip(option_letters(len(options)), options, strict=True)
    return "\n".join([*(f"{letter}. {option}" for letter, option in lettered), instruction])
