"""Where a text goes on after an interruption: what it says again is dropped; pure."""

from __future__ import annotations

import re

_WORD = re.compile(r"\S+")

# Different words that must come again. Fewer may well be meant: "0, 0, 0", "New York, New York".
_LEAST = 3


class Seam:
    """The next part of a text, as it comes, without the words it repeats.

    Dropped is the longest beginning that is, word for word, the end of what was written, with at
    least three different words in it. Words are what white space separates, whichever and however
    much. The last word that was written may have been cut, and then goes on in its middle. So the
    whole reads as if the part stood in the place of what it repeats. Texts without spaces between
    words stay as they are.

    Attributes:
        held: what is held back, since it may be the beginning of a repetition.
        dropped: what was one.
    """

    def __init__(self, written: str) -> None:
        self.held = ""
        self.dropped = ""
        self._written = _WORD.findall(written)
        self._is_cut = not written[-1:].isspace()
        # Where in what was written the part may have begun to repeat it.
        self._starts = _starts(self._written)
        # Of the part: words compared, where they end, and where a repetition does.
        self._words = 0
        self._compared = 0
        self._repeated = 0
        self._skips_space = False

    def add(self, piece: str) -> str:
        """More of the part; returns what can be shown."""
        self.held += piece
        for word in list(_WORD.finditer(self.held, self._compared)):
            if word.end() == len(self.held):  # It may go on.
                return "" if self._may_repeat(word.group()) else self._decide()
            self._compare(word)
        return "" if self._starts else self._decide()

    def end(self) -> str:
        """That was all of the part; returns what can be shown."""
        for word in _WORD.finditer(self.held, self._compared):
            self._compare(word)
        return self._decide()

    def _compare(self, word: re.Match[str]) -> None:
        last = len(self._written) - 1
        going_on: list[int] = []
        for start in self._starts:
            at = start + self._words
            if not self._matches(at, word.group()):
                continue
            if at < last:
                going_on.append(start)
            else:  # Longer than any before.
                self._repeated = word.start() + len(self._written[last])
        self._starts = going_on
        self._words += 1
        self._compared = word.end()

    def _matches(self, at: int, word: str) -> bool:
        if at == len(self._written) - 1 and self._is_cut:
            return word.startswith(self._written[at])
        return word == self._written[at]

    def _may_repeat(self, beginning: str) -> bool:
        """Whether a word of which that is the beginning may belong to a repetition."""
        return any(
            self._written[at].startswith(beginning) or self._matches(at, beginning)
            for at in (start + self._words for start in self._starts)
        )

    def _decide(self) -> str:
        """There is nothing to wait for."""
        shown, self.held, self._starts = self.held, "", []
        if self._repeated:
            self.dropped, shown = shown[: self._repeated], shown[self._repeated :]
            self._repeated = 0
            # The space that stands there is that before what follows.
            self._skips_space = not self._is_cut
        if self._skips_space:
            shown = shown.lstrip()
            self._skips_space = not shown
        return shown


def _starts(words: list[str]) -> list[int]:
    """Places with enough different words behind them."""
    different: set[str] = set()
    for place in range(len(words) - 1, -1, -1):
        different.add(words[place])
        if len(different) == _LEAST:
            return list(range(place + 1))
    return []
