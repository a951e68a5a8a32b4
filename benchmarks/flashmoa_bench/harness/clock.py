"""The benchmarks' clock, which runs in the time of the modelled GPUs.

On a slow machine, engines may take K times their GPU's time (``--device-slowdown K``). Then agents
must also write, requests arrive and waits last K times as long. So benchmarks read this clock and
sleep by it, and their figures are the GPU's times for every K.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import anyio

_slowdown = 1.0


@contextmanager
def slowed_down(factor: float) -> Generator[None]:
    """Let the clock run ``factor`` times slower than the machine's within the context."""
    global _slowdown
    before, _slowdown = _slowdown, factor
    try:
        yield
    finally:
        _slowdown = before


def now() -> float:
    """Return the time in seconds since an arbitrary moment."""
    return time.perf_counter() / _slowdown


def seconds_of(machine_seconds: float) -> float:
    """Convert seconds of the machine's clock to seconds of this clock."""
    return machine_seconds / _slowdown


def machine_seconds(seconds: float) -> float:
    """Convert seconds of this clock to seconds of the machine's clock, for timeouts."""
    return seconds * _slowdown


async def sleep(seconds: float) -> None:
    """Sleep for ``seconds`` of this clock."""
    await anyio.sleep(machine_seconds(seconds))


async def sleep_until(moment: float) -> None:
    """Sleep until :func:`now` reaches ``moment``."""
    await sleep(max(0.0, moment - now()))
