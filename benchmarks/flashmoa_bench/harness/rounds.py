"""Rounds of measurements: their order, and statistics over small samples of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Name = TypeVar("Name", bound=str)


def alternating(repeats: int, ways: Sequence[Name]) -> list[Name]:
    """Return each way ``repeats`` times, every round starting with another one.

    Drift of the machine then affects all ways alike.
    """
    return [ways[(start + i) % len(ways)] for start in range(repeats) for i in range(len(ways))]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a ``share`` (0 to 1) of ``values`` do not exceed, by nearest rank."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gaps(times: Sequence[float]) -> list[float]:
    """Return the time from each moment to the next."""
    return [after - before for before, after in pairwise(times)]
