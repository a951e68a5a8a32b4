"""When the layers of a forward computed with their experts, and when these came.

A forward is timed only where that was asked for; the others pay nothing.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from flashmoa_sglang.saturation import LayerTimes


class Mark(Protocol):
    """A point of time in the order of computations or copies."""

    def seconds_since(self, earlier: Mark) -> float:
        """Once both have been reached; waits for that."""
        ...


class HostMark:
    """On a device that does what it is told at once."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self._at - earlier._at


class StreamMark:
    """On a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, StreamMark)
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


class ForwardClock:
    """Marks of one forward of so many ``tokens``, as it goes through its layers with experts.

    Args:
        beside_experts: copies go on while experts compute, as they do with two slots or more.
    """

    def __init__(self, tokens: int, *, beside_experts: bool) -> None:
        self._tokens = tokens
        self._beside_experts = beside_experts
        self.began: list[Mark] = []
        self.ended: list[Mark] = []
        self.copies: list[tuple[Mark, Mark]] = []

    def times(self) -> LayerTimes | None:
        """``None`` where the forward had fewer than two layers, or nothing was copied.

        The first layer waits for nothing, as its experts stay on the device: from there to the
        second one's is what a layer computes (§B.4: layer 0).
        """
        if len(self.began) < 2 or not self.copies:
            return None
        from_there = self.began[0] if self._beside_experts else self.ended[0]
        return LayerTimes(
            tokens=self._tokens,
            window=self.began[1].seconds_since(from_there),
            transfer=max(after.seconds_since(before) for before, after in self.copies),
        )
