"""``Pace``: when clients append next.

Answering an append takes the HTTP process about a millisecond, and on a CPU it takes that from a
forward. So each answer names a time for the next append at which no other client appends, and the
more streams are open the longer each gathers its text.
"""

from __future__ import annotations

# Seconds between two appends of different streams: appends take at most a quarter of a core.
# Each of 256 streams then gathers for 1.3 s, in which agents write about as many tokens as are left
# to the request anyway.
_APART = 0.005
# The least seconds between two appends of the same stream.
_SOONEST = 0.04


class Pace:
    """Spreads the appends of all streams evenly. Times are in seconds, of any one clock.

    Args: slowdown: factor of all intervals, for a modelled GPU that is slowed down.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self._last = 0.0

    def next(self, now: float, streams: int) -> float:
        """Return how long the stream that has just appended should gather text.

        Args: streams: number of open streams.
        """
        soonest = _SOONEST * self._slowdown
        interval = max(_APART * self._slowdown * streams, soonest)
        next_turn = max(self._last + interval / max(streams, 1), now + soonest)
        self._last = min(next_turn, now + 2 * interval)
        return self._last - now
