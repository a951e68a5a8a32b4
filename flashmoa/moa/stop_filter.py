"""End a text at a stop text while it is written (``StopFilter``); pure."""

from __future__ import annotations

from collections.abc import Sequence


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
