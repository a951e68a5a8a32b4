"""What a forward costs: seconds against tokens, measured once at start."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of one forward by its new tokens; linear between, and beyond, measured points.

    Args:
        points: (tokens, seconds), at least two. They are sorted, and made to rise: more
            tokens never cost less, whatever a noisy measurement says.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rising: list[tuple[int, float]] = []
        for tokens, seconds in sorted(self.points):
            least = rising[-1][1] if rising else 0.0
            rising.append((tokens, max(seconds, least)))
        if len({tokens for tokens, _ in rising}) < 2:
            raise ValueError("A cost curve needs measurements at two different sizes.")
        object.__setattr__(self, "points", tuple(rising))

    def seconds(self, tokens: float) -> float:
        """What a forward of that many tokens takes."""
        (x0, y0), (x1, y1) = self._segment(tokens)
        return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), 0.0)

    def tokens(self, seconds: float) -> int:
        """The most tokens whose forward takes no longer; may be 0."""
        low, high = 0, 1
        while high < 1 << 20 and self.seconds(high) <= seconds:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def per_token(self) -> float:
        """Seconds of one more token in a large forward."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return (y1 - y0) / (x1 - x0)

    def decode_weight(self) -> float:
        """What a decode step takes, in prefill tokens."""
        return max(1.0, self.seconds(1) / max(self.per_token(), 1e-9))

    def _segment(self, tokens: float) -> tuple[tuple[int, float], tuple[int, float]]:
        after = bisect_right(self.points, tokens, key=lambda point: point[0])
        after = min(max(after, 1), len(self.points) - 1)
        return self.points[after - 1], self.points[after]


# Until it is measured: a guess between a CPU core and a GPU, so that nothing waits for it.
UNMEASURED = CostCurve(((1, 0.01), (1024, 0.5)))
