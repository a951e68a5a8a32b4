"""Filter a text while it is written: ``RepeatFilter`` and ``StopFilter``; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"\S+")

# Repetitions with fewer different words are kept, as they may be intended: "0, 0, 0", "New York,
# New York".
_MIN_DIFFERENT_WORDS = 3


class RepeatFilter:
    """Filters the next part of a text while it is written: drops the words that it repeats.

    It drops the longest beginning of the part that equals, word for word, the end of the text
    before it, if that has at least three different words. Words are separated by white space of
    any kind and length. The last word before the part may have been cut off; then a repetition may
    complete it. Texts without spaces between words are not changed.

    Args:
        written: the text before the part.

    Attributes:
        held: the text that is held back because it may become a repetition.
        dropped: the repetition that was found; empty if there was none.
    """

    def __init__(self, written: str) -> None:
        self.held = ""
        self.dropped = ""
        self._written = _WORD.findall(written)
        self._is_cut = not written[-1:].isspace()
        # Indexes of written words at which a repetition may have begun.
        self._starts = _possible_starts(self._written)
        # The number of the part's words that were compared, and the offset in the part of their
        # end. The offset of the longest repetition's end, 0 if none was found.
        self._compared_words = 0
        self._compared_end = 0
        self._repetition_end = 0
        self._skips_space = False

    def add(self, piece: str) -> str:
        """Add the next piece of the part. Return the text that is certain to be kept."""
        self.held += piece
        for word in list(_WORD.finditer(self.held, self._compared_end)):
            if word.end() == len(self.held):  # The word may not be complete.
                return "" if self._may_repeat(word.group()) else self._release()
            self._compare(word)
        return "" if self._starts else self._release()

    def end(self) -> str:
        """End the part. Return the rest of the text that is kept."""
        for word in _WORD.finditer(self.held, self._compared_end):
            self._compare(word)
        return self._release()

    def _compare(self, word: re.Match[str]) -> None:
        last = len(self._written) - 1
        still_possible: list[int] = []
        for start in self._starts:
            index = start + self._compared_words
            if not self._matches(index, word.group()):
                continue
            if index < last:
                still_possible.append(start)
            else:  # A whole repetition, longer than any found before.
                self._repetition_end = word.start() + len(self._written[last])
        self._starts = still_possible
        self._compared_words += 1
        self._compared_end = word.end()

    def _matches(self, index: int, word: str) -> bool:
        """Return whether a word equals the written word at an index, or completes it."""
        if index == len(self._written) - 1 and self._is_cut:
            return word.startswith(self._written[index])
        return word == self._written[index]

    def _may_repeat(self, beginning: str) -> bool:
        """Return whether a word with that beginning may belong to a repetition."""
        return any(
            self._written[index].startswith(beginning) or self._matches(index, beginning)
            for index in (start + self._compared_words for start in self._starts)
        )

    def _release(self) -> str:
        """Stop comparing. Return the held text without the repetition."""
        kept, self.held, self._starts = self.held, "", []
        if self._repetition_end:
            self.dropped, kept = kept[: self._repetition_end], kept[self._repetition_end :]
            self._repetition_end = 0
            # If the text before ends with white space, that at the rest's beginning is dropped.
            self._skips_space = not self._is_cut
        if self._skips_space:
            kept = kept.lstrip()
            self._skips_space = not kept
        return kept


def _possible_starts(words: list[str]) -> list[int]:
    """Return the indexes of words that enough different words follow, themselves included."""
    different_words: set[str] = set()
    for index in range(len(words) - 1, -1, -1):
        different_words.add(words[index])
        if len(different_words) == _MIN_DIFFERENT_WORDS:
            return list(range(index + 1))
    return []


class StopFilter:
    """Ends a text before the first stop text in it, which may come in several pieces.

    Args:
        stops: the stop texts; without any, the text is not changed.

    Attributes:
        found: whether the text has ended.
        held: the end of the text so far, if it may be the beginning of a stop text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = [stop for stop in stops if stop]
        self.held = ""

    def add(self, piece: str) -> str:
        """Add the next piece. Return the text that is certain to be kept."""
        if self.found:
            return ""
        self.held += piece
        places = [self.held.index(stop) for stop in self._stops if stop in self.held]
        self.found = bool(places)
        kept = min(places) if places else len(self.held) - self._open_length()
        text, self.held = self.held[:kept], "" if places else self.held[kept:]
        return text

    def end(self) -> str:
        """End the text. Return the rest of it that is kept."""
        text, self.held = self.held, ""
        return text

    def _open_length(self) -> int:
        """Return the length of the longest end of the text with which a stop text begins."""
        longest = max((len(stop) for stop in self._stops), default=0)
        return next(
            (
                length
                for length in range(min(longest, len(self.held)), 0, -1)
                if any(stop.startswith(self.held[-length:]) for stop in self._stops)
            ),
            0,
        )
