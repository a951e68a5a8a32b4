"""Copies into slots: beside the computation on a device with streams, else in its way."""

from __future__ import annotations

from typing import Protocol

import torch

from flashmoa_sglang.asyncep.experts import Source
from flashmoa_sglang.asyncep.timing import HostMark, Mark, StreamMark


class Copying(Protocol):
    """Copies from sources into slots; all calls in the order of the computation."""

    def fetch(self, slot: int, memory: torch.Tensor, source: Source) -> None:
        """Begin to fill a slot, once what was computed with it so far is done."""
        ...

    def wait(self, slot: int) -> None:
        """What is computed from now on sees the slot filled."""
        ...

    def used(self, slot: int) -> None:
        """What has been computed up to now has used the slot."""
        ...

    def mark(self) -> Mark:
        """Where the computation is."""
        ...

    def timed_fetch(self, slot: int, memory: torch.Tensor, source: Source) -> tuple[Mark, Mark]:
        """``fetch``, and when the copy began and ended."""
        ...


class PlainCopying:
    """For devices without streams."""

    def fetch(self, slot: int, memory: torch.Tensor, source: Source) -> None:
        source.fill(memory)

    def wait(self, slot: int) -> None:
        pass

    def used(self, slot: int) -> None:
        pass

    def mark(self) -> Mark:
        return HostMark()

    def timed_fetch(self, slot: int, memory: torch.Tensor, source: Source) -> tuple[Mark, Mark]:
        before = HostMark()
        self.fetch(slot, memory, source)
        return before, HostMark()


class StreamCopying:
    """On a CUDA stream of its own, from pinned memory.

    Made once the slots are: what has had their memory before is done before the first copies.
    """

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._filled = [torch.cuda.Event() for _ in range(slots)]
        self._used = [torch.cuda.Event() for _ in range(slots)]
        for slot in range(slots):
            self.used(slot)

    def fetch(self, slot: int, memory: torch.Tensor, source: Source) -> None:
        self._stream.wait_event(self._used[slot])
        with torch.cuda.stream(self._stream):
            source.fill(memory)
            self._filled[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])

    def used(self, slot: int) -> None:
        self._used[slot].record(torch.cuda.current_stream(self._device))

    def mark(self) -> Mark:
        return StreamMark(torch.cuda.current_stream(self._device))

    def timed_fetch(self, slot: int, memory: torch.Tensor, source: Source) -> tuple[Mark, Mark]:
        # Not from before the slot is free: that wait is the computation's.
        self._stream.wait_event(self._used[slot])
        before = StreamMark(self._stream)
        self.fetch(slot, memory, source)
        return before, StreamMark(self._stream)


def copying_for(device: torch.device, slots: int) -> Copying:
    return StreamCopying(device, slots) if device.type == "cuda" else PlainCopying()
