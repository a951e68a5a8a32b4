"""Measure what a step of a long-lived process keeps in memory."""

import gc
import sys
from collections.abc import Awaitable, Callable

import anyio
import pytest

# For `kept_by`, the number of steps that finds a leak, and the number that finds a rare one, too.
few_or_many = pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.nightly)])


async def kept_by(step: Callable[[int], Awaitable[object]], steps: int = 60) -> float:
    """Return the number of objects that a step keeps for ever, strings included.

    Each of six windows takes N steps. The first two fill caches. A leak grows in any two windows,
    an object that is kept by chance does not, and a cache may be emptied in every other window.
    """
    counts: list[int] = []
    for window in range(6):
        for number in range(steps):
            await step(window * steps + number)
        await anyio.wait_all_tasks_blocked()
        gc.collect()
        counts.append(sys.getallocatedblocks())
    grown = [now - before for before, now in zip(counts[1:], counts[3:], strict=False)]
    return min(grown) / (2 * steps)
