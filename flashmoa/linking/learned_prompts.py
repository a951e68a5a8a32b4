"""Predict the messages of a call from those of the same call in an earlier run.

A program that runs again asks much the same. What differs are the answers of its calls and what it
was given; both appear in the messages of later calls, and each is replaced there by the text that
stands for it in the current run. Pure functions of JSON values; no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flashmoa.linking.learned_strings import (
    TextFinder,
    common_first_words,
    common_last_words,
    common_prefix,
    replace,
)

Messages = Sequence[Mapping[str, Any]]


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


def predict(value: Any, stands_for: Callable[[str], str | None], finder: TextFinder) -> Any:
    """Return a JSON value of an earlier run as it is likely to be in this one.

    Args:
        value: a string, or lists and mappings of such values, for instance messages.
        stands_for: returns what stands in this run for a text of the earlier one, if that is known.
            A text is replaced where it is a whole string, and within strings where it is no part of
            a longer word; of texts that overlap, the longest is.
        finder: finds the texts for which something may be known.
    """
    if isinstance(value, str):
        whole = stands_for(value)
        if whole is not None:
            return whole
        parts = [(part, stands_for(part)) for part in finder.within(value)]
        return replace(value, [(part, now) for part, now in parts if now is not None])
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: predict(item, stands_for, finder) for key, item in items}
    if isinstance(value, list | tuple):
        return [predict(item, stands_for, finder) for item in cast("list[Any]", value)]
    return value


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
    content, other_content = message.get("content"), other.get("content")
    if not isinstance(content, str) or not isinstance(other_content, str):
        return 0
    if {**message, "content": None} != {**other, "content": None}:
        return 0
    return common_prefix(content, other_content)


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
    start = common_first_words(string, other)
    rest, other_rest = string[start:], other[start:]
    end = common_last_words(rest, other_rest)
    return rest[: len(rest) - end], other_rest[: len(other_rest) - end]


def have_same_start(messages: Messages, other: Messages) -> bool:
    """Return whether the contents of two first messages begin with the same word, or are equal."""
    contents = [first.get("content") for first in (*messages[:1], *other[:1])]
    return len(contents) < 2 or contents[0] == contents[1] or any(similarity(*contents))


def similarity(value: Any, other: Any) -> tuple[int, ...]:
    """Return how far a JSON value is like another one: the place at which they begin to differ.

    The place is a path into ``other``. Of two values, the one with the greater place is like
    ``other`` for longer; that of a value which is equal to it is the greatest.
    """
    pairs: list[tuple[Any, Any]]
    if isinstance(value, str) and isinstance(other, str):
        return (common_first_words(value, other),)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        fields = cast("Mapping[str, Any]", value)
        pairs = [(fields.get(key), item) for key, item in cast("Mapping[str, Any]", other).items()]
    elif isinstance(value, list | tuple) and isinstance(other, list | tuple):
        pairs = list(zip(cast("list[Any]", value), cast("list[Any]", other), strict=False))
    else:
        return ()
    for place, (one, another) in enumerate(pairs):
        if one != another:
            return (place, *similarity(one, another))
    sizes = len(cast("Sequence[Any]", value)), len(cast("Sequence[Any]", other))
    return (len(pairs) + (sizes[0] == sizes[1]),)
