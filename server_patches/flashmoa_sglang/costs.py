"""``Costs``: how many seconds prefills, decode steps and both in one step take, as measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

# What a file says is checked; see ``read_costs``.
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Points = tuple[tuple[PositiveInt, Seconds], ...]
# Numbers of tokens in measured steps, decodes included. Tokens of streams ride along in such steps.
# Kernels compute tokens in blocks of up to 128, and the rest of a block is nearly free: with
# Qwen3-32B on an A100, the 129th token adds 20 ms to a step, and the 64 before it 7 together.
STEP_SIZES = (32, 64, 128, 256, 512)
# Fewer tokens are not worth an increment in such a step.
FEWEST_RIDING = 16


class TimedForward(NamedTuple):
    """What a forward computed, and how many seconds it took.

    Attributes:
        decodes: number of requests that decode in it.
        kv: number of tokens whose KV the decodes read.
        tokens: number of tokens that it prefills.
        pairs: the sum, over the prefilled tokens, of the number of cached tokens before each.
    """

    decodes: int
    kv: int
    tokens: int
    pairs: int
    seconds: float


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward by its tokens, interpolated between measured points.

    The points were measured without context. The seconds for a context are added.

    Args:
        points: measured prefills as (tokens, seconds), of at least two sizes. They are sorted, and
            no prefill costs more than a larger one: noise makes forwards longer.
        decode_step: seconds of a decode step of one request. It has other kernels than a prefill of
            one token, and on a GPU CUDA graphs.
        mixed: measured steps of several decodes, without and with a prefill, as (decodes, prefilled
            tokens, seconds); empty if this engine cannot mix the two.
        per_kv_token: additional seconds of a decode step for each token whose KV it reads.
        per_pair: additional seconds of a prefill for each pair of a prefilled and a cached token.

    Raises: ValueError if all points have the same size.
    """

    points: Points
    decode_step: Seconds
    mixed: tuple[tuple[PositiveInt, NonNegativeInt, Seconds], ...] = ()
    per_kv_token: Seconds = 0.0
    per_pair: Seconds = 0.0

    def __post_init__(self) -> None:
        points: dict[int, float] = {}
        most = inf
        for tokens, seconds in sorted(self.points, reverse=True):
            most = points[tokens] = min(seconds, most)
        if len(points) < 2:
            raise ValueError(f"Costs need measurements at two different sizes, not at {[*points]}.")
        object.__setattr__(self, "points", tuple(sorted(points.items())))

    def prefill(self, tokens: float, context: float = 0) -> float:
        """Return the seconds of a forward that prefills ``tokens`` tokens.

        Args: context: how many tokens are cached before each prefilled token.
        """
        return _interpolate(self.points, tokens) + self.per_pair * tokens * context

    def decode(self, requests: int, kv: float = 0) -> float:
        """Return the seconds of a decode step of ``requests`` requests with ``kv`` tokens."""
        steps = self._decodes
        if len(steps) == 1:
            alone = steps[0][1] + self.per_token * (requests - 1)
        else:
            alone = _interpolate(steps, requests)
        return alone + self.per_kv_token * kv

    def added(self, decodes: int, tokens: int, context: float = 0) -> float:
        """Return by how many seconds a prefill of ``tokens`` tokens lengthens a decode step.

        The total of tokens decides how long kernels take. So a mixed step takes the time of the
        measured step with the same total and the next smaller number of decodes. Tokens beyond the
        largest measured step take the time that they add to a prefill.
        """
        if not tokens:
            return 0.0
        read = self.per_pair * tokens * context
        lines = self._lines
        if not lines:
            return max(0.0, self.prefill(tokens + decodes) - self.decode(decodes)) + read
        count = max((one for one in lines if one <= decodes), default=min(lines))
        line, total = lines[count], max(count, decodes) + tokens
        most = min(total, line[-1][0])
        more = self.prefill(total) - self.prefill(most)
        alone = max(line[0][1], self.decode(decodes)) if decodes > count else line[0][1]
        return max(0.0, _interpolate(line, most) - alone + more) + read

    @cached_property
    def _decodes(self) -> list[tuple[int, float]]:
        """Decode steps as (requests, seconds)."""
        measured = {n: seconds for n, tokens, seconds in self.mixed if not tokens}
        return sorted({1: self.decode_step, **measured}.items())

    @cached_property
    def _lines(self) -> dict[int, list[tuple[int, float]]]:
        """By number of decodes, the measured steps as (tokens with the decodes, seconds)."""
        steps: dict[int, dict[int, float]] = {}
        for count, prefill, seconds in sorted(self.mixed):
            steps.setdefault(count, {})[count + prefill] = seconds
        return {count: [*line.items()] for count, line in steps.items() if len(line) > 1}

    @property
    def per_token(self) -> float:
        """Seconds that each further token adds to a forward, on average."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return (y1 - y0) / (x1 - x0)

    @property
    def per_token_at_best(self) -> float:
        """Seconds per token of the most efficient measured forward."""
        return min(seconds / tokens for tokens, seconds in self.points)

    @property
    def decode_weight(self) -> float:
        """Seconds of a decode step of one request, in tokens of prefill."""
        # If only small prefills ran, which all take the same time, more tokens seem to take none.
        per_token = max(self.per_token, self.per_token_at_best / 4, 1e-9)
        return max(1.0, self.decode(1) / per_token)

    def tokens_within(self, seconds: float) -> int:
        """Return the most tokens whose prefill takes at most ``seconds``; may be 0."""
        return max(0, bisect_right(range(1 << 20), seconds, key=self.prefill) - 1)


def _interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Return the value at ``x`` on the line through the two points that are nearest to it."""
    after = bisect_right(points, x, key=lambda point: point[0])
    after = min(max(after, 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


# A guess between a CPU core and a GPU, so that nothing has to wait for the measurement.
UNMEASURED = Costs(((1, 0.01), (1024, 0.5)), decode_step=0.01)
