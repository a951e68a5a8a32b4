"""``Clock``: the time of a modelled GPU, which computes one forward after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Keeps when the modelled GPU is free, and how far the run can be trusted.

    A forward begins when it is launched and the GPU is free. Its real computation happens at once,
    on this machine's CPU, and has to be done before the forward would begin to be waited for: if it
    took longer than the GPU would, the forward is counted as an overrun.

    Args:
        now, sleep: the machine's clock, in seconds.

    Attributes:
        free_at: when the GPU has computed all that was launched.
        forwards, overruns: numbers of forwards.
        device_seconds, overrun_seconds: time of all forwards, and of those that overran.
        starved_seconds: time in which the GPU had nothing to compute because the scheduler was
            still preparing the next batch.
        computing_seconds: CPU time of the forwards' real computation, which no GPU's host has.
    """

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    free_at: float = 0.0
    forwards: int = 0
    overruns: int = 0
    device_seconds: float = 0.0
    overrun_seconds: float = 0.0
    starved_seconds: float = 0.0
    computing_seconds: float = 0.0

    def launch(
        self, seconds: float, launched: float, computed: float, *, follows: bool = False
    ) -> float:
        """Add a forward of ``seconds``; return when its result is there.

        Args:
            launched, computed: when its real computation began and had ended.
            follows: whether the scheduler went on from the forward before without becoming idle.
        """
        begins = max(self.free_at, launched)
        if follows:
            self.starved_seconds += begins - self.free_at
        self.free_at = begins + seconds
        self.forwards += 1
        self.device_seconds += seconds
        if computed > self.free_at:
            self.overruns += 1
            self.overrun_seconds += computed - self.free_at
        return self.free_at

    def wait_until(self, moment: float) -> None:
        """Return when this moment has come."""
        while (left := moment - self.now()) > 0:
            self.sleep(left)
