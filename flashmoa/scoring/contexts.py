"""What stands before the candidates: text, messages or tokens; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa.scoring.distribution import letters

Messages = Sequence[Mapping[str, Any]]
# Text, token ids, or messages as OpenAI has them.
Context = str | Sequence[int] | Messages


def kind_of(context: Context) -> str:
    """``text``, ``tokens`` or ``messages``. Raises: ValueError for anything else."""
    if isinstance(context, str):
        return "text"
    items = list(cast("Sequence[object]", context))
    if items and all(isinstance(one, Mapping) for one in items):
        return "messages"
    if items and all(isinstance(one, int) and not isinstance(one, bool) for one in items):
        return "tokens"
    raise ValueError(
        "a context is a text, a list of messages or a list of token ids; none is empty"
    )


def asked(context: Context, question: str) -> Context:
    """The context with a question after it: in the last message of the user, or after a text.

    A text then ends as one that goes on with the answer.

    Raises: ValueError for token ids, which only the engine can add a text to.
    """
    kind = kind_of(context)
    if kind == "tokens":
        raise ValueError("a question is added to a text or to messages; token ids are for score()")
    if kind == "text":
        return f"{context}\n\n{question}\nAnswer:"
    *before, last = cast("Messages", context)
    if last.get("role") != "user":
        return [*before, last, {"role": "user", "content": question}]
    return [*before, {**last, "content": _extended(last.get("content"), question)}]


def answer_of(context: Context, text: str) -> str:
    """An answer as it follows what :func:`asked` makes."""
    return f" {text}" if isinstance(context, str) else text


def lettered(options: Sequence[str], instruction: str) -> str:
    """A question of one choice. Raises: ValueError for more options than letters."""
    named = zip(letters(len(options)), options, strict=True)
    return "\n".join([*(f"{letter}. {option}" for letter, option in named), instruction])


def _extended(content: object, text: str) -> object:
    if isinstance(content, list):
        return [*cast("list[object]", content), {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}" if content else text
