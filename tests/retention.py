"""Measure what a step of a long-lived process keeps in memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable

import anyio


async def kept_by(step: Callable[[int], Awaitable[object]], steps: int = 100) -> float:
    """Return how many objects one step keeps, strings included, once many steps were taken.

    What a step keeps is kept by those before and after it, while a cache is filled only once.
    """
    counts: list[int] = []
    for window in range(4):
        for number in range(steps):
            await step(window * steps + number)
        await anyio.wait_all_tasks_blocked()
        gc.collect()
        counts.append(sys.getallocatedblocks())
    return min(counts[2] - counts[1], counts[3] - counts[2]) / steps
