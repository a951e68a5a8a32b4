"""The costs of a forward: seconds against tokens, measured once at start."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one forward by its new tokens; linear between, and beyond, measured points.

    Args:
        points: prefill forwards as (tokens, seconds), at two sizes at least. They are sorted,
            and made to rise: more tokens never cost less, whatever a noisy measurement says.
        decode_step: seconds of a decode step of one request. Not that of a prefill of one
            token: decode has kernels, and on a GPU graphs, of its own.
    """

    points: Points
    decode_step: float

    def __post_init__(self) -> None:
        rising: list[tuple[int, float]] = []
        for tokens, seconds in sorted(self.points):
            least = rising[-1][1] if rising else 0.0
            rising.append((tokens, max(seconds, least)))
        if len({tokens for tokens, _ in rising}) < 2:
            sizes = sorted({tokens for tokens, _ in rising})
            raise ValueError(f"Costs need measurements at two different sizes, not at {sizes}.")
        object.__setattr__(self, "points", tuple(rising))

    def prefill(self, tokens: float) -> float:
        """Return the seconds of a prefill forward."""
        (x0, y0), (x1, y1) = self._segment(tokens)
        return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), 0.0)

    def decode(self, requests: int) -> float:
        """Return the seconds of a decode step of so many requests."""
        return self.decode_step + self.per_token * (requests - 1)

    @property
    def per_token(self) -> float:
        """Seconds of one more token in a large forward."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return (y1 - y0) / (x1 - x0)

    @property
    def decode_weight(self) -> float:
        """The prefill tokens that take as long as a decode step of one request."""
        return max(1.0, self.decode_step / max(self.per_token, 1e-9))

    def tokens_within(self, seconds: float) -> int:
        """Return the most tokens whose prefill takes no longer; may be 0."""
        low, high = 0, 1
        while high < 1 << 20 and self.prefill(high) <= seconds:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.prefill(middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def _segment(self, tokens: float) -> Points:
        after = bisect_right(self.points, tokens, key=lambda point: point[0])
        after = min(max(after, 1), len(self.points) - 1)
        return self.points[after - 1 : after + 1]


# Until they are measured: a guess between a CPU core and a GPU, so that nothing waits.
UNMEASURED = Costs(((1, 0.01), (1024, 0.5)), decode_step=0.01)
