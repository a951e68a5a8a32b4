"""What clients say of a request beside SGLang's fields (:func:`read_hints`).

The plugin's own hints come in the body or by header: a program's body may be left as it is, and
SGLang's router passes headers on that begin with ``X-Request-Id-``, but not unknown fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from flashmoa_sglang.http.errors import shown

STREAM = "prompt_stream_id"
EXPECTED_OUTPUT = "expected_output_tokens"
STREAM_HEADER = "X-Request-Id-FlashMoA-Stream"
EXPECTED_OUTPUT_HEADER = "X-Request-Id-FlashMoA-Tokens"
# Schedulers compute with the numbers in hints; a larger one would be infinite there, or an error.
LARGEST_NUMBER = 2**31 - 1
_DIGITS = re.compile(r"[0-9]{1,10}")
_TTL = re.compile(r"([1-9][0-9]{0,5})([smh])")
_DEFAULT_TTL = "30m"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says of a request beside SGLang's fields; each is ``None`` if it is not given.

    Attributes:
        stream: the id of the prompt stream that has the beginning of the prompt.
        expected_output: the number of tokens that the client expects in the answer.
        priority: a larger one is more urgent.
        prewarm: for how many seconds the prompt's KV is to be kept, without an answer.
    """

    stream: str | None = None
    expected_output: int | None = None
    priority: int | None = None
    prewarm: float | None = None


def read_hints(http_request: Any) -> Hints:
    """Read an HTTP request's hints: the plugin's own, Dynamo's and OpenAI's.

    A hint in the body counts before the same one by header.

    Raises:
        ValueError: if a hint in the body has a wrong type or value (SGLang answers 400).
    """
    if http_request is None:
        return Hints()
    # SGLang has already parsed the body, and Starlette keeps the result.
    body = getattr(http_request, "_json", None)
    hints = _read_body(body) if isinstance(body, dict) else Hints()
    if hints.stream is None:
        hints = replace(hints, stream=named_stream(http_request))
    if hints.expected_output is None:
        hints = replace(hints, expected_output=_expected_output(http_request))
    return hints


def named_stream(http_request: Any) -> str | None:
    """Return the id of the prompt stream that a request's header names, if it names one."""
    return http_request.headers.get(STREAM_HEADER) or None


def _expected_output(http_request: Any) -> int | None:
    """Return the length of the answer that a request's header names; ``None`` if it is no such."""
    named = http_request.headers.get(EXPECTED_OUTPUT_HEADER, "")
    number = int(named) if _DIGITS.fullmatch(named) else None
    return number if number is not None and number <= LARGEST_NUMBER else None


def _read_body(body: dict[str, Any]) -> Hints:
    stream_id = body.get(STREAM)
    if stream_id is not None and not isinstance(stream_id, str):
        raise ValueError(
            f"{STREAM} must be a string, as returned by POST /prompt_streams, not "
            f"{shown(stream_id)}."
        )
    dynamo = _object(_object(body, "nvext"), "agent_hints", "nvext.")
    expected = _whole_number(body, EXPECTED_OUTPUT, 0)
    if expected is None:
        expected = _whole_number(dynamo, "osl", 0, "nvext.agent_hints.")
    priority = _whole_number(dynamo, "priority", -LARGEST_NUMBER, "nvext.agent_hints.")
    return Hints(stream_id, expected, priority, _read_prewarm(body))


def _object(body: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    """Return the object of this name; an empty one if there is none."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{where}{name} must be an object, not {shown(value)}.")
    return value or {}


def _whole_number(body: dict[str, Any], name: str, least: int, where: str = "") -> int | None:
    value = body.get(name)
    # In Python a bool is an int; in JSON it is not a number.
    if value is not None and not (type(value) is int and least <= value <= LARGEST_NUMBER):
        raise ValueError(
            f"{where}{name} must be an integer from {least} to {LARGEST_NUMBER}, not "
            f"{shown(value)}."
        )
    return value


def _read_prewarm(body: dict[str, Any]) -> float | None:
    """Return for how long OpenAI's ``prompt_cache_options`` ask for a prompt without an answer."""
    if "messages" not in body and "input" not in body:
        return None  # It is no chat.
    options = _object(body, "prompt_cache_options")
    prewarm, ttl = options.get("prewarm"), options.get("ttl")
    if prewarm is not None and not isinstance(prewarm, bool):
        raise ValueError(
            f"prompt_cache_options.prewarm must be true or false, not {shown(prewarm)}."
        )
    if not prewarm:
        return None  # What else the options say is not for this server.
    ttl = _DEFAULT_TTL if ttl is None else ttl
    match = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if match is None:
        raise ValueError(
            "prompt_cache_options.ttl must be a number of seconds, minutes or hours above 0, such "
            f"as {_DEFAULT_TTL!r}, not {shown(ttl)}."
        )
    return float(match[1]) * _SECONDS[match[2]]
