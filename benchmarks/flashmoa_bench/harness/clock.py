"""The clock of benchmarks, which runs in the time of the modelled GPUs that are measured.

Engines may take K times the time of their GPU (``--device-slowdown K``), for a machine that does
not keep up. Then everything else that takes time has to take K times as long, too: agents that
write at a set pace, requests that arrive at set times, and waits. So benchmarks read this clock and
sleep by it. Their figures are the GPU's times, whatever K is.
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
    """Return a span of this clock, given as seconds of the machine's clock."""
    return machine_seconds / _slowdown


def machine_seconds(seconds: float) -> float:
    """Return a span of the machine's clock, such as a timeout, given as seconds of this one."""
    return seconds * _slowdown


async def sleep(seconds: float) -> None:
    """Sleep for ``seconds`` of this clock."""
    await anyio.sleep(machine_seconds(seconds))


async def sleep_until(moment: float) -> None:
    """Sleep until :func:`now` reaches ``moment``."""
    await sleep(max(0.0, moment - now()))
