"""Statistics of small samples; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a ``share`` (0 to 1) of ``values`` do not exceed, by nearest rank."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gaps(times: Sequence[float]) -> list[float]:
    """From each moment to the next."""
    return [after - before for before, after in pairwise(times)]
