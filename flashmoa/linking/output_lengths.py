"""``OutputLengths``: how long each agent's answers have been."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

# Older answers of an agent say little about its next one.
_REMEMBERED = 8


class OutputLengths:
    """The lengths of the agents' last answers in tokens, from which the next one is expected."""

    def __init__(self) -> None:
        self._lengths: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def add(self, agent: str, tokens: int) -> None:
        """Note the length of an agent's answer."""
        self._lengths[agent].append(tokens)

    def expect(self, agent: str) -> int | None:
        """Return the median of the last answers; ``None`` for an agent that has not answered."""
        lengths = self._lengths.get(agent)
        return round(median(lengths)) if lengths else None
