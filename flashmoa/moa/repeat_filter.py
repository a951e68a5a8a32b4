"""A filter for texts that go on after an interruption and repeat their own end; pure."""

from __future__ import annotations

import re

_WORD = re.compile(r"\S+")

# A repetition has at least so many different words. Shorter ones may well be meant: "0, 0, 0",
# "New York, New York".
_MIN_DIFFERENT_WORDS = 3


class RepeatFilter:
    """Passes on the next part of a text as it comes, without the words that it repeats.

    It drops the longest beginning of the part that is, word for word, the end of what was written
    before, if there are at least three different words in it. Words are separated by white space
    of any kind and length. The last word written may have been cut off; a repetition then goes on
    in the middle of it. The whole text reads as if the part stood in place of what it repeats.
    Texts without spaces between words stay as they are.

    Args:
        written: the text before the part.

    Attributes:
        held: what is held back because it may become a repetition.
        dropped: the repetition that was found.
    """

    def __init__(self, written: str) -> None:
        self.held = ""
        self.dropped = ""
        self._written = _WORD.findall(written)
        self._is_cut = not written[-1:].isspace()
        # Indexes of written words at which a repetition may have begun.
        self._starts = _possible_starts(self._written)
        # In the part: how many words were compared, and the offsets where they and a repetition
        # end.
        self._words = 0
        self._compared = 0
        self._repeated = 0
        self._skips_space = False

    def add(self, piece: str) -> str:
        """Take the next piece of the part and return what can be passed on."""
        self.held += piece
        for word in list(_WORD.finditer(self.held, self._compared)):
            if word.end() == len(self.held):  # The word may not be complete.
                return "" if self._may_repeat(word.group()) else self._release()
            self._compare(word)
        return "" if self._starts else self._release()

    def end(self) -> str:
        """End the part and return what can be passed on."""
        for word in _WORD.finditer(self.held, self._compared):
            self._compare(word)
        return self._release()

    def _compare(self, word: re.Match[str]) -> None:
        last = len(self._written) - 1
        still_possible: list[int] = []
        for start in self._starts:
            at = start + self._words
            if not self._matches(at, word.group()):
                continue
            if at < last:
                still_possible.append(start)
            else:  # A whole repetition, longer than any found before.
                self._repeated = word.start() + len(self._written[last])
        self._starts = still_possible
        self._words += 1
        self._compared = word.end()

    def _matches(self, at: int, word: str) -> bool:
        if at == len(self._written) - 1 and self._is_cut:
            return word.startswith(self._written[at])
        return word == self._written[at]

    def _may_repeat(self, beginning: str) -> bool:
        """Return whether a word with that beginning may belong to a repetition."""
        return any(
            self._written[at].startswith(beginning) or self._matches(at, beginning)
            for at in (start + self._words for start in self._starts)
        )

    def _release(self) -> str:
        """Return what is held without the repetition found, if any, and stop comparing."""
        passed, self.held, self._starts = self.held, "", []
        if self._repeated:
            self.dropped, passed = passed[: self._repeated], passed[self._repeated :]
            self._repeated = 0
            # White space was written already, so that before the rest of the part is left out.
            self._skips_space = not self._is_cut
        if self._skips_space:
            passed = passed.lstrip()
            self._skips_space = not passed
        return passed


def _possible_starts(words: list[str]) -> list[int]:
    """Return the indexes from which on there are enough different words."""
    different: set[str] = set()
    for index in range(len(words) - 1, -1, -1):
        different.add(words[index])
        if len(different) == _MIN_DIFFERENT_WORDS:
            return list(range(index + 1))
    return []
