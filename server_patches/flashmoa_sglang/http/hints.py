"""What a client may say of an ordinary request beside SGLang's own fields.

Hints: they change when and how cheaply a request is computed, never what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STREAM = "prompt_stream_id"
EXPECTED_OUTPUT = "expected_output_tokens"


@dataclass(frozen=True, slots=True)
class Hints:
    """``stream_id``: the prompt stream that holds the beginning of the prompt.
    ``expected_output``: how many tokens the answer is likely to have."""

    stream_id: str | None = None
    expected_output: int | None = None


def of(http_request: Any) -> Hints:
    """The hints in an HTTP request's body.

    Raises:
        ValueError: one is not what it should be (SGLang answers 400).
    """
    # SGLang has parsed the body by now, and Starlette keeps the result.
    body = getattr(http_request, "_json", None)
    if not isinstance(body, dict):
        return Hints()
    stream_id, expected = body.get(STREAM), body.get(EXPECTED_OUTPUT)
    if stream_id is not None and not isinstance(stream_id, str):
        raise ValueError(f"{STREAM} must be a string, as returned by POST /prompt_streams.")
    # ``True`` is an int to Python, and to nobody else.
    if expected is not None and (type(expected) is not int or expected < 0):
        raise ValueError(f"{EXPECTED_OUTPUT} must be an integer of at least 0.")
    return Hints(stream_id, expected)
