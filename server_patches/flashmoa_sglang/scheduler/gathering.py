"""Prefills wait for one another, until a forward of them hides the transfers of experts.

MoE-Prefill §7.4: admission. Pure, and without a clock: time is what steps are known to take, so
that tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

# Seconds of a step in which nothing runs, and of them the scheduler sleeps.
IDLE_STEP, IDLE_SLEEP = 0.0025, 0.002


class Gathering:
    """Whether the queue waits for more to come.

    Args:
        tokens: from which on a forward is worth it.
        patience: seconds that a request is held back at most, all in all.
    """

    def __init__(self, tokens: int, patience: float) -> None:
        self.tokens = tokens
        self._patience = patience
        # Of those in the queue: seconds they were held back.
        self._held: dict[str, float] = {}

    def holds(self, queue: Sequence[str], tokens: int, room: int, step: float) -> bool:
        """Whether nobody of the queue goes in this step, which will take ``step`` seconds.

        Args:
            queue: ids of the waiting requests. tokens: that they have to compute.
            room: how many of them could run.
        """
        self._held = {rid: self._held.get(rid, 0.0) for rid in queue}
        if not queue or len(queue) >= room or tokens >= self.tokens:
            return False
        held = {rid: seconds + step for rid, seconds in self._held.items()}
        if max(held.values()) > self._patience:
            return False
        self._held = held
        return True
