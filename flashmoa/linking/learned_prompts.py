"""Predict the messages of a call from those of the same call in an earlier run.

A program that runs again asks much the same. What differs are the answers of its calls and what it
was given; both appear in the messages of later calls, and each is replaced there by the text that
stands for it in the current run. Pure functions of JSON values; no I/O.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

Messages = Sequence[Mapping[str, Any]]

# A shorter text is replaced only where it is a whole string, since it may be in a string by chance.
_SHORTEST_PART = 4


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place at which a call's messages were not as predicted.

    Attributes:
        message: index of the first message that differs.
        offset: number of characters of its content that are as predicted; 0 if anything else in the
            message differs, too, or if its content is not a string.
    """

    message: int
    offset: int


def predict(value: Any, known: Mapping[str, str]) -> Any:
    """Return a JSON value of an earlier run as it is likely to be in this one.

    Args:
        value: a string, or lists and mappings of such values, for instance messages.
        known: texts of the earlier run and what stands for each in this run. A text is replaced
            where it is a whole string, and within strings where it is no part of a longer word; of
            texts that overlap, the longest is.
    """
    parts = sorted((text for text in known if len(text) >= _SHORTEST_PART), key=len, reverse=True)
    return _replace(value, known, parts)


def _replace(value: Any, known: Mapping[str, str], parts: Sequence[str]) -> Any:
    if isinstance(value, str):
        return known[value] if value in known else _replace_within(value, known, parts)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _replace(item, known, parts) for key, item in items}
    if isinstance(value, list | tuple):
        return [_replace(item, known, parts) for item in cast("list[Any]", value)]
    return value


def _replace_within(string: str, known: Mapping[str, str], parts: Sequence[str]) -> str:
    # Every second piece is a replacement, in which nothing is replaced again.
    pieces = [string]
    for part in parts:
        pieces = [
            new
            for index, piece in enumerate(pieces)
            for new in ([piece] if index % 2 else _cut(piece, part, known[part]))
        ]
    return "".join(pieces)


def _cut(string: str, part: str, replacement: str) -> list[str]:
    """Cut a string at each occurrence of a part, and put the replacement between the pieces."""
    pieces: list[str] = []
    done = start = 0
    while (at := string.find(part, start)) >= 0:
        end = start = at + len(part)
        if not _splits_word(string, at) and not _splits_word(string, end):
            pieces += [string[done:at], replacement]
            done = end
    return [*pieces, string[done:]]


def _splits_word(string: str, at: int) -> bool:
    return 0 < at < len(string) and string[at - 1].isalnum() and string[at].isalnum()


def find_divergence(predicted: Messages, actual: Messages) -> Divergence | None:
    """Return where messages differ from those predicted; ``None`` if they do not."""
    for index, (expected, message) in enumerate(zip(predicted, actual, strict=False)):
        if expected != message:
            return Divergence(index, _common_content(expected, message))
    if len(predicted) == len(actual):
        return None
    return Divergence(min(len(predicted), len(actual)), 0)


def _common_content(message: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return the length of the contents' common beginning if all else in two messages is equal."""
    contents = [message.get("content"), other.get("content")]
    if not all(isinstance(content, str) for content in contents):
        return 0
    if {**message, "content": None} != {**other, "content": None}:
        return 0
    return len(os.path.commonprefix(cast("list[str]", contents)))  # noqa: RUF071


def end_at(messages: Messages, divergence: Divergence, other: str) -> list[Mapping[str, Any]]:
    """Return messages that are the same before a divergence, and there continue with ``other``."""
    kept = list(messages[: divergence.message])
    if divergence.message >= len(messages):
        return [*kept, {"role": "user", "content": other}]
    message = messages[divergence.message]
    if divergence.offset and isinstance(message.get("content"), str):
        return [*kept, {**message, "content": message["content"][: divergence.offset] + other}]
    return [*kept, {"role": message.get("role", "user"), "content": other}]


def find_changes(earlier: Any, predicted: Any, actual: Any) -> dict[str, str]:
    """Return the strings of an earlier run that are others than predicted, with what they are.

    Where what was predicted and what came begin or end alike, the part in which they differ is
    returned as well, in whole words. Values of different shapes are not compared.

    Args:
        earlier: the value of the earlier run.
        predicted: what :func:`predict` made of it.
        actual: the value of this run.
    """
    changes: dict[str, str] = {}
    values: tuple[Any, ...] = (earlier, predicted, actual)
    if all(isinstance(value, str) for value in values):
        if predicted != actual:
            before, now = _differing_part(predicted, actual)
            changes = {earlier: actual, before: now}
    elif all(isinstance(value, Mapping) for value in values):
        for key in earlier.keys() & actual.keys():
            changes |= find_changes(earlier[key], predicted[key], actual[key])
    elif all(isinstance(value, list | tuple) for value in values):
        for items in zip(*values, strict=False):
            changes |= find_changes(*items)
    changes.pop("", None)
    return changes


def _differing_part(string: str, other: str) -> tuple[str, str]:
    """Return the two strings without the words with which both begin, and both end."""
    start = len(os.path.commonprefix([string, other]))  # noqa: RUF071
    while _splits_word(string, start) or _splits_word(other, start):
        start -= 1
    rest, other_rest = string[start:], other[start:]
    end = len(os.path.commonprefix([rest[::-1], other_rest[::-1]]))  # noqa: RUF071
    while any(_splits_word(text, len(text) - end) for text in (rest, other_rest)):
        end -= 1
    return rest[: len(rest) - end], other_rest[: len(other_rest) - end]


def similarity(messages: Messages, other: Messages) -> int:
    """Return the number of characters with which two lists of messages, as JSON, begin alike."""
    texts = [json.dumps(each, ensure_ascii=False) for each in (messages, other)]
    return len(os.path.commonprefix(texts))  # noqa: RUF071
