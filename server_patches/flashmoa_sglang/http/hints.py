"""What clients say of a request beside SGLang's fields (:func:`read_hints`).

The plugin's own hints come in the body or by header. A program may have to leave its body as it is,
and SGLang's router drops unknown fields but passes headers on that begin with ``X-Request-Id-``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from flashmoa_sglang.http.errors import MalformedRequest, shown

STREAM = "prompt_stream_id"
EXPECTED_OUTPUT = "expected_output_tokens"
STREAM_HEADER = "X-Request-Id-FlashMoA-Stream"
EXPECTED_OUTPUT_HEADER = "X-Request-Id-FlashMoA-Tokens"
# Schedulers compute with the numbers in hints; a larger one would be infinite there, or an error.
LARGEST_NUMBER = 2**31 - 1
_TTL_UNITS = {"s": "seconds", "m": "minutes", "h": "hours"}


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says of a request beside SGLang's fields; ``None`` if it says nothing.

    Attributes:
        stream: the id of the prompt stream that has the beginning of the prompt.
        expected_output: the number of tokens that the client expects in the answer.
        priority: a larger one is more urgent.
        prewarm: how many seconds to keep the prompt's KV, without an answer.
    """

    stream: str | None = None
    expected_output: int | None = None
    priority: int | None = None
    prewarm: float | None = None


def read_hints(http_request: Any) -> Hints:
    """Read an HTTP request's hints: the plugin's own, Dynamo's and OpenAI's.

    A hint in the body counts before the same hint by header.

    Raises:
        MalformedRequest: if a hint in the body has a wrong type or value.
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
    """Return the length of the answer that a header names; ``None`` if it is no valid number."""
    named = http_request.headers.get(EXPECTED_OUTPUT_HEADER, "")
    number = int(named) if re.fullmatch("[0-9]{1,10}", named) else None
    return number if number is not None and number <= LARGEST_NUMBER else None


def _read_body(body: dict[str, Any]) -> Hints:
    stream_id = body.get(STREAM)
    # An answer repeats the id, and not all releases can write half a character.
    is_text = isinstance(stream_id, str) and not re.search("[\ud800-\udfff]", stream_id)
    if stream_id is not None and not is_text:
        raise MalformedRequest(
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
        raise MalformedRequest(f"{where}{name} must be an object, not {shown(value)}.")
    return value or {}


def _whole_number(body: dict[str, Any], name: str, least: int, where: str = "") -> int | None:
    value = body.get(name)
    # In Python a bool is an int; in JSON it is not a number.
    if value is not None and not (type(value) is int and least <= value <= LARGEST_NUMBER):
        raise MalformedRequest(
            f"{where}{name} must be an integer from {least} to {LARGEST_NUMBER}, not "
            f"{shown(value)}."
        )
    return value


def _read_prewarm(body: dict[str, Any]) -> float | None:
    """Return how many seconds OpenAI's ``prompt_cache_options`` ask to keep a prompt."""
    if "messages" not in body and "input" not in body:
        return None  # It is no chat.
    options = _object(body, "prompt_cache_options")
    prewarm, ttl = options.get("prewarm"), options.get("ttl")
    if prewarm is not None and not isinstance(prewarm, bool):
        raise MalformedRequest(
            f"prompt_cache_options.prewarm must be true or false, not {shown(prewarm)}."
        )
    if not prewarm:
        return None  # The other options are not for this server.
    default = "30m"
    ttl = default if ttl is None else ttl
    match = re.fullmatch("([1-9][0-9]{0,5})([smh])", ttl) if isinstance(ttl, str) else None
    if match is None:
        raise MalformedRequest(
            "prompt_cache_options.ttl must be a number of seconds, minutes or hours above 0, such "
            f"as {default!r}, not {shown(ttl)}."
        )
    return timedelta(**{_TTL_UNITS[match[2]]: int(match[1])}).total_seconds()
