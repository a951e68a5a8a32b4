"""Predict a request from the same request of an earlier run (:func:`predict`, :class:`KnownTexts`).

A program that runs again asks much the same. Its input and the answers of its calls differ, and
later messages contain them: there the current run's text replaces the earlier run's text. Prompts
may be megabytes long and many texts may be known, so no loop here goes over characters, and no text
is searched for twice in the same string. No I/O.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

Messages = Sequence[Mapping[str, Any]]
# Returns the text of this run in place of a text, or of the answer with a key; ``None`` if unknown.
FindText = Callable[[str], str | None]

# Matches a sequence of characters that `str.isalnum` accepts.
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place where a call's messages began to differ from the prediction.

    Attributes:
        message: index of the first message that differs.
        offset: number of characters of its content that are as predicted; 0 if another field of the
            message differs, too, or if its content is not a string.
    """

    message: int
    offset: int


class SharedValues:
    """Replaces JSON values by equal ones that it has seen, so that each is in memory once.

    Attributes:
        size: an estimate of the bytes of all values that it has seen.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, Any] = {}
        self.size = 0

    def __call__(self, value: Any) -> Any:
        key: Hashable = value
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value).items()
            value = {self(name): self(item) for name, item in fields}
            key = (dict, *((name, _identity(item)) for name, item in value.items()))
        elif isinstance(value, list | tuple):
            value = [self(item) for item in cast("list[Any]", value)]
            key = (list, *map(_identity, value))
        elif not isinstance(value, str):
            return value
        if key not in self._seen:
            self._seen[key] = value
            self.size += sys.getsizeof(value) + (sys.getsizeof(key) if key is not value else 0)
        return self._seen[key]


def _identity(value: object) -> Hashable:
    if isinstance(value, str | dict | list):
        return id(cast("object", value))
    # Numbers of different types may be equal.
    return type(value), value


class TextFinder:
    """Finds texts within strings, and remembers for each string which texts it contains.

    A string is searched once for each text. A text that is only part of a longer word may or may
    not be found. Texts of fewer than 4 characters are not: a string may contain them by chance.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: set[str] = set()
        # Each text's number, under the word that the fewest other texts are under: a string without
        # the word cannot contain the text. Texts without words are under an empty one.
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        self._in_order: list[str] = []
        # By string, the texts in it, and the number of texts that it was searched for.
        self._found: dict[str, tuple[Sequence[str], int]] = {}
        self.add(texts)

    def add(self, texts: Iterable[str]) -> None:
        """Find these texts, too, from now on."""
        for text in texts:
            if len(text) >= 4 and text not in self._texts:
                words = _longest_words(text)
                word = min(words, key=lambda each: len(self._by_word[each]), default="")
                self._by_word[word].append(len(self._in_order))
                self._in_order.append(text)
                self._texts.add(text)

    def within(self, string: str) -> Sequence[str]:
        """Return the texts that are in a string, the longest first.

        Their order does not depend on when they were added.
        """
        found, searched = self._found.get(string, ((), 0))
        if searched < len(self._in_order):
            new = [text for text in self._likely(string, searched) if text in string]
            if new:
                found = sorted([*found, *new], key=lambda text: (-len(text), text))
            self._found[string] = found, len(self._in_order)
        return found

    def _likely(self, string: str, searched: int) -> Iterable[str]:
        """Return the texts that may be in a string and that it was not searched for."""
        # For a few texts, splitting the string into words takes longer.
        if len(self._in_order) - searched <= 32:
            return self._in_order[searched:]
        words = {"", *_WORD.findall(string)}
        places = [self._by_word[word] for word in words if word in self._by_word]
        new = (each[bisect_left(each, searched) :] for each in places)
        return [self._in_order[number] for numbers in new for number in numbers]


def _longest_words(text: str) -> Sequence[str]:
    """Return the 8 longest words at the beginning of a text, the longest first."""
    beginning = text[:1000]
    words: list[str] = _WORD.findall(beginning)
    if beginning != text:
        words = words[:-1]  # The last word may be cut off.
    return sorted(set(words), key=lambda word: (-len(word), word))[:8]


class KnownTexts:
    """Replaces the texts of an earlier run by the texts of this run.

    The new text is looked up when the old text is met in a string, since far more texts are known
    than a prompt contains.

    Args:
        answers: the answers of the earlier run, by the keys of its calls.
        call_ids: the ids of the calls of tools in its other answers, by the same keys.
    """

    def __init__(self, answers: Mapping[str, str], call_ids: Mapping[str, Sequence[str]]) -> None:
        # By text, the keys of the calls that were answered with it, each with the function that
        # makes the text of the answer, or with the number of the tool's call whose id the text is.
        self._places: defaultdict[str, list[tuple[str, Callable[[str], str] | int]]]
        self._places = defaultdict(list)
        for key, answer in answers.items():
            # Programs often strip an answer.
            self._places[answer.strip()].append((key, str.strip))
            self._places[answer].append((key, str))
        for key, ids in call_ids.items():
            for number, id_ in enumerate(ids):
                self._places[id_].append((key, number))
        self._places.pop("", None)  # An empty text is everywhere.
        # The texts of this run in place of other texts.
        self._changes: dict[str, str] = {}
        self._finder = TextFinder(self._places)

    def learn(self, changes: Mapping[str, str]) -> None:
        """Replace unknown texts as in ``changes`` from now on (see :func:`find_changes`)."""
        for text, now in changes.items():
            self._changes.setdefault(text, now)
        self._finder.add(changes)

    def predict(
        self, value: Any, find_text: FindText, find_ids: Callable[[str], Sequence[str]]
    ) -> Any:
        """Return the likely form in this run of a JSON value of the earlier run.

        Args:
            find_text: returns this run's text in place of the answer of the call with a key;
                ``None`` if it is not known, or the value cannot contain the answer.
            find_ids: returns the ids of the calls of tools in the answer to the call with a key.
        """

        def find_replacement(text: str) -> str | None:
            found: set[str] = set()
            # Several calls may have had the same answer; the last known answer counts.
            for key, place in reversed(self._places.get(text, ())):
                if isinstance(place, int):
                    found.update(find_ids(key)[place : place + 1])
                elif (answer := find_text(key)) is not None:
                    return place(answer)
            if found:
                # Some models number the calls of each answer anew, so that several calls had an id.
                # It stays if it has become different ids.
                return found.pop() if len(found) == 1 else None
            return self._changes.get(text)

        return predict(value, find_replacement, self._finder)


def predict(value: Any, find_text: FindText, finder: TextFinder) -> Any:
    """Return the likely form in this run of a JSON value of an earlier run.

    Args:
        value: a string, or lists and mappings of such values, for instance messages.
        find_text: returns this run's text in place of a text of the earlier run, if it is known.
            A text is replaced where it is a whole string, and within strings where it is no part of
            a longer word. If texts overlap, the longest is replaced.
        finder: finds the texts that ``find_text`` may know.
    """
    if isinstance(value, str):
        whole = find_text(value)
        if whole is not None:
            return whole
        found = [(text, find_text(text)) for text in finder.within(value)]
        return replace(value, [(text, now) for text, now in found if now is not None])
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: predict(item, find_text, finder) for key, item in items}
    if isinstance(value, list | tuple):
        return [predict(item, find_text, finder) for item in cast("list[Any]", value)]
    return value


def replace(string: str, texts: Iterable[tuple[str, str]]) -> str:
    """Replace texts in a string, but not where they are part of a longer word.

    Args:
        texts: each with its replacement. If texts overlap, the first is replaced.
    """
    # Where the replaced texts start and end, in the order of the string, and their replacements.
    starts: list[int] = []
    ends: list[int] = []
    replacements: list[str] = []
    for text, replacement in texts:
        start = 0
        while (at := string.find(text, start)) >= 0:
            # A place where it is part of a longer word may overlap a place where it is not.
            end, start = at + len(text), at + 1
            place = bisect_right(ends, at)
            if place < len(starts) and starts[place] < end:
                start = ends[place]
            elif not _splits_word(string, at) and not _splits_word(string, end):
                start = end
                starts.insert(place, at)
                ends.insert(place, end)
                replacements.insert(place, replacement)
    kept = [string[end:start] for end, start in zip([0, *ends], [*starts, None], strict=True)]
    return "".join(text for pair in zip(kept, [*replacements, ""], strict=True) for text in pair)


def find_divergence(predicted: Messages, actual: Messages) -> Divergence | None:
    """Return where messages differ from the prediction; ``None`` if they do not."""
    for index, (expected, message) in enumerate(zip(predicted, actual, strict=False)):
        if expected != message:
            return Divergence(index, _common_content(expected, message))
    if len(predicted) == len(actual):
        return None
    return Divergence(min(len(predicted), len(actual)), 0)


def _common_content(message: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return the length of the contents' common beginning; 0 if other fields differ."""
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
    """Return the strings of an earlier run that were predicted wrongly, with the actual strings.

    If prediction and actual string begin or end alike, the differing words between are returned as
    well. Values of different shapes are not compared.

    Args:
        earlier: the value of the earlier run.
        predicted: the value that :func:`predict` returned for it.
        actual: the value of this run.
    """
    changes: dict[str, str] = {}
    values: tuple[Any, ...] = (earlier, predicted, actual)
    if all(isinstance(value, str) for value in values):
        if predicted != actual:
            start = common_first_words(predicted, actual)
            end = common_last_words(predicted[start:], actual[start:])
            before, now = (text[start : len(text) - end] for text in (predicted, actual))
            changes = {earlier: actual, before: now}
    elif all(isinstance(value, Mapping) for value in values):
        for key in earlier.keys() & actual.keys():
            changes |= find_changes(earlier[key], predicted[key], actual[key])
    elif all(isinstance(value, list | tuple) for value in values):
        for items in zip(*values, strict=False):
            changes |= find_changes(*items)
    changes.pop("", None)
    return changes


def have_same_start(messages: Messages, other: Messages) -> bool:
    """Return whether the contents of two first messages begin with the same word, or are equal."""
    contents = [first.get("content") for first in (*messages[:1], *other[:1])]
    return len(contents) < 2 or contents[0] == contents[1] or any(similarity(*contents))


def similarity(value: Any, other: Any) -> tuple[int, ...]:
    """Return the place where a JSON value begins to differ from another value.

    The place is a path into ``other``, greater the later it is, and greatest for an equal value.
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


def common_prefix(string: str, other: str) -> int:
    """Return the length in characters of the common beginning of two strings."""
    alike, end, step = 0, min(len(string), len(other)), 64
    # Most strings differ soon, so each slice that is compared doubles in length.
    while alike < end and string[alike : alike + step] == other[alike : alike + step]:
        alike, step = min(alike + step, end), step * 2
    end = min(end, alike + step)
    while alike < end:
        middle = (alike + end + 1) // 2
        if string[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            end = middle - 1
    return alike


def common_first_words(string: str, other: str) -> int:
    """Return the length in characters of the common words at the beginning of two strings."""
    end = common_prefix(string, other)
    if not _splits_word(string, end) and not _splits_word(other, end):
        return end
    word = _WORD.match(string[:end][::-1])
    return end - (word.end() if word else 0)


def common_last_words(string: str, other: str) -> int:
    """Return the length in characters of the common words at the end of two strings."""
    return common_first_words(string[::-1], other[::-1])


def _splits_word(string: str, at: int) -> bool:
    return 0 < at < len(string) and string[at - 1].isalnum() and string[at].isalnum()
