"""When clients append next: seldom enough to cost others nothing, and never all at once.

Answering an append takes the HTTP process some half of a millisecond, which on a CPU is taken
from a forward. So each answer names a time at which nobody else has been asked to come.
"""

from __future__ import annotations

# Seconds between two appends of different streams, and between two of the same.
_APART = 0.02
_SOONEST, _LATEST = 0.04, 0.25


class Pace:
    """Spreads the appends of all streams evenly. Times in seconds of any one clock."""

    def __init__(self) -> None:
        self._last = 0.0

    def next(self, now: float, streams: int, busy: bool) -> float:
        """How long the stream that has just appended should gather text.

        Args:
            streams: how many are open.
            busy: whether others' requests are running; increments are seconds apart then,
                and what is appended in between would only wait.
        """
        around = _LATEST if busy else min(max(_APART * streams, _SOONEST), _LATEST)
        turn = max(self._last + around / max(streams, 1), now + _SOONEST)
        self._last = min(turn, now + _LATEST)
        return self._last - now
