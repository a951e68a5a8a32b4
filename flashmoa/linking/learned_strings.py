"""Compare long strings, and find known texts within them (:class:`TextFinder`).

Prompts may be megabytes long and many texts may be known, so no loop here goes over characters, and
nothing is looked for twice in the same string. No I/O.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

# A shorter text is replaced only where it is a whole string, since it may be in a string by chance.
_SHORTEST_PART = 4

# To take a string apart into words pays if more texts than this are looked for in it.
_FEW_TEXTS = 32

# The number of characters of a text among which its longest words are taken, and how many of these.
_SAMPLE = 1000
_MOST_WORDS = 3

# The number of characters that are compared first.
_FIRST_STEP = 64

# Of characters for which `str.isalnum` is true.
_WORD = re.compile(r"[^\W_]+")


class TextFinder:
    """Finds texts within strings, and remembers for each string which are in it.

    A string that is asked about again is only searched for the texts that were added since. Where a
    text would only be part of a longer word, it may or may not be found.

    Args:
        texts: the first texts. Such as are too short to be looked for within strings are left out.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        # Each with words that are in every string in which it is found.
        self._texts: dict[str, frozenset[str]] = {}
        # By string, the texts that are in it, and how many of all texts were looked for.
        self._found: dict[str, tuple[Sequence[str], int]] = {}
        self.add(texts)

    def add(self, texts: Iterable[str]) -> None:
        """Look for these texts, too, from now on."""
        for text in texts:
            if len(text) >= _SHORTEST_PART and text not in self._texts:
                self._texts[text] = _telling_words(text)

    def within(self, string: str) -> Sequence[str]:
        """Return the texts that are in a string, the longest first.

        Their order does not depend on when they were added.
        """
        found, searched = self._found.get(string, ((), 0))
        if searched < len(self._texts):
            new = [text for text in self._likely(string, searched) if text in string]
            if new:
                found = sorted([*found, *new], key=lambda text: (-len(text), text))
            self._found[string] = found, len(self._texts)
        return found

    def _likely(self, string: str, searched: int) -> Iterable[str]:
        """Return the texts that may be in a string, without those that were looked for before."""
        count = len(self._texts) - searched
        # In the order of the dictionary; those at its end were added last.
        new = islice(reversed(self._texts.items()), count)
        if count <= _FEW_TEXTS:
            return [text for text, _ in new]
        # A look at a set is much quicker than a search in the string.
        words = frozenset(_WORD.findall(string))
        return [text for text, telling in new if telling <= words]


def _telling_words(text: str) -> frozenset[str]:
    """Return the longest words at the beginning of a text, which few strings have by chance."""
    words: list[str] = _WORD.findall(text[:_SAMPLE])
    if len(text) > _SAMPLE:
        # The last one may be cut off.
        words = words[:-1]
    return frozenset(sorted(words, key=len)[-_MOST_WORDS:])


def replace(string: str, parts: Iterable[tuple[str, str]]) -> str:
    """Replace parts of a string, but not where they are part of a longer word.

    Args:
        parts: each with its replacement. Of those that overlap, the first one is replaced.
    """
    # Where the replaced parts start and end, in the order of the string, and what replaces them.
    starts: list[int] = []
    ends: list[int] = []
    replacements: list[str] = []
    for part, replacement in parts:
        start = 0
        while (at := string.find(part, start)) >= 0:
            end = start = at + len(part)
            place = bisect_right(ends, at)
            if place < len(starts) and starts[place] < end:
                start = ends[place]
            elif not _splits_word(string, at) and not _splits_word(string, end):
                starts.insert(place, at)
                ends.insert(place, end)
                replacements.insert(place, replacement)
    kept = [string[end:start] for end, start in zip([0, *ends], [*starts, None], strict=True)]
    return "".join(piece for pair in zip(kept, [*replacements, ""], strict=True) for piece in pair)


def _splits_word(string: str, at: int) -> bool:
    """Return whether the characters on both sides of a place belong to one word."""
    return 0 < at < len(string) and string[at - 1].isalnum() and string[at].isalnum()


def common_prefix(string: str, other: str) -> int:
    """Return the number of characters with which two strings begin alike."""
    return _count_alike(
        min(len(string), len(other)), lambda start, end: string[start:end] == other[start:end]
    )


def common_suffix(string: str, other: str) -> int:
    """Return the number of characters with which two strings end alike."""
    length, other_length = len(string), len(other)
    return _count_alike(
        min(length, other_length),
        lambda start, end: (
            string[length - end : length - start]
            == other[other_length - end : other_length - start]
        ),
    )


def common_first_words(string: str, other: str) -> int:
    """Return the number of characters of the words with which two strings begin alike."""
    end = common_prefix(string, other)
    if not _splits_word(string, end) and not _splits_word(other, end):
        return end
    return end - _count_alike(end, lambda start, stop: string[end - stop : end - start].isalnum())


def common_last_words(string: str, other: str) -> int:
    """Return the number of characters of the words with which two strings end alike."""
    count = common_suffix(string, other)
    begin = len(string) - count
    if not _splits_word(string, begin) and not _splits_word(other, len(other) - count):
        return count
    return count - _count_alike(
        count, lambda start, stop: string[begin + start : begin + stop].isalnum()
    )


def _count_alike(most: int, are_alike: Callable[[int, int], bool]) -> int:
    """Return how many characters are alike before the first that is not.

    Args:
        most: how many there are.
        are_alike: returns whether those from one number to another are.
    """
    done, step = 0, _FIRST_STEP
    while (end := min(done + step, most)) > done and are_alike(done, end):
        done, step = end, 2 * step
    # The first that is not alike is among the next ones, if there is one.
    while done < end:
        middle = (done + end + 1) // 2
        if are_alike(done, middle):
            done = middle
        else:
            end = middle - 1
    return done
