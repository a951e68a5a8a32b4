"""Measure what a step of a long-lived process keeps in memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable

import anyio

_STEPS = 150


async def kept_by(step: Callable[[int], Awaitable[object]]) -> float:
    """Return how many objects one step keeps, strings included, once many steps were taken."""
    for number in range(_STEPS):
        await step(number)
    before = await _count()
    for number in range(_STEPS, 2 * _STEPS):
        await step(number)
    return (await _count() - before) / _STEPS


async def _count() -> int:
    await anyio.wait_all_tasks_blocked()
    gc.collect()
    return sys.getallocatedblocks()
