"""``Costs``: how many seconds a forward of some tokens takes, as measured once at start."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a forward by its number of new tokens, interpolated between measured points.

    Args:
        points: measured prefills as (tokens, seconds), of at least two sizes. They are sorted, and
            one that costs less than a smaller prefill, because of noise, is raised to its costs.
        decode_step: seconds of a decode step of one request. A prefill of one token takes another
            time, because decoding has other kernels, and on a GPU CUDA graphs.

    Raises: ValueError if all points have the same size.
    """

    points: Points
    decode_step: float

    def __post_init__(self) -> None:
        points: list[tuple[int, float]] = []
        for tokens, seconds in sorted(self.points):
            least = points[-1][1] if points else 0.0
            points.append((tokens, max(seconds, least)))
        sizes = sorted({tokens for tokens, _ in points})
        if len(sizes) < 2:
            raise ValueError(f"Costs need measurements at two different sizes, not at {sizes}.")
        object.__setattr__(self, "points", tuple(points))

    def prefill(self, tokens: float) -> float:
        """Return the seconds of a forward that prefills ``tokens`` tokens."""
        # The two points between which the size lies, or the two that are nearest to it.
        after = bisect_right(self.points, tokens, key=lambda point: point[0])
        after = min(max(after, 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[after - 1 : after + 1]
        return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), 0.0)

    def decode(self, requests: int) -> float:
        """Return the seconds of a decode step of ``requests`` requests."""
        return self.decode_step + self.per_token * (requests - 1)

    @property
    def per_token(self) -> float:
        """Seconds that each further token adds to a forward, on average."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return (y1 - y0) / (x1 - x0)

    @property
    def decode_weight(self) -> float:
        """Number of prefill tokens that take as long as a decode step of one request."""
        return max(1.0, self.decode_step / max(self.per_token, 1e-9))

    def tokens_within(self, seconds: float) -> int:
        """Return the most tokens whose prefill takes at most ``seconds``; may be 0."""
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


# Used until the costs are measured, so that nothing has to wait for the measurement: a guess
# between a CPU core and a GPU.
UNMEASURED = Costs(((1, 0.01), (1024, 0.5)), decode_step=0.01)
