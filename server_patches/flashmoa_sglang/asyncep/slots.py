"""Slots for experts on the device: which layer's experts each holds, copies into them, their times.

``SlotRotation`` decides, ``SlotCopier`` and ``StreamCopier`` copy, ``ForwardClock`` measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from flashmoa_sglang.asyncep.cuda import CudaDevice
from flashmoa_sglang.asyncep.experts import PackedExperts
from flashmoa_sglang.saturation import LayerTimes

Marks = tuple[Any, Any]


class SlotRotation:
    """Decides which layer's experts each slot holds; copies nothing itself.

    Layers are numbered in the order in which a forward computes them. At the start slot i holds
    layer i. When a layer has computed, its slot is for the next layer that has none. Layers may
    compute in any order, but only in this one are their experts always copied ahead.

    Attributes:
        slots: the layer that each slot holds, or that is being copied into it.
        misses: how often a layer was needed that no slot held.
    """

    def __init__(self, layers: int, slots: int) -> None:
        if layers < 1 or slots < 1:
            raise ValueError(f"{layers} layers in {slots} slots: at least one of each is needed")
        self._layers = layers
        self.slots: list[int] = list(range(min(layers, slots)))
        self.misses = 0

    def slot_of(self, layer: int) -> int | None:
        """Return the slot that holds a layer; ``None`` if no slot does."""
        return self.slots.index(layer) if layer in self.slots else None

    def evict_for(self, layer: int) -> int:
        """Assign to a layer that no slot holds the slot whose layer is needed last after it."""
        self.misses += 1
        slot = max(
            range(len(self.slots)), key=lambda index: (self.slots[index] - layer) % self._layers
        )
        self.slots[slot] = layer
        return slot

    def advance(self, layer: int) -> tuple[int, int] | None:
        """Note that a layer has computed. Return its slot, and the layer to copy into it.

        Return ``None`` if every layer has a slot, so that nothing needs to be copied.
        """
        if len(self.slots) == self._layers:
            return None
        slot = self.slots.index(layer)
        following = (layer + 1) % self._layers
        while following in self.slots:
            following = (following + 1) % self._layers
        self.slots[slot] = following
        return slot, following


class SlotCopier:
    """Copies experts into slots.

    This class copies synchronously, on a CPU; ``StreamCopier`` overrides it for CUDA. Call the
    methods in the order in which the computation is enqueued: on CUDA nothing has run yet when they
    return. A mark is a point in that order, to measure the time between two of them.
    """

    def fetch(self, slot: int, memory: torch.Tensor, source: PackedExperts) -> None:
        """Copy experts into a slot, after all computation that has been enqueued with the slot."""
        for channel in source.channels:
            for target, run in source.copies(memory, channel):
                target.copy_(run)

    def wait(self, slot: int) -> None:
        """Delay all computation that is enqueued from now on until the slot has been filled."""

    def note_use(self, slot: int) -> None:
        """Note that the computation that has been enqueued so far reads the slot."""

    def mark(self) -> Any:
        """Return a mark at this point of the computation."""
        return time.perf_counter()

    def timed_fetch(self, slot: int, memory: torch.Tensor, source: PackedExperts) -> list[Marks]:
        """Do the same as ``fetch``. Return marks before and after the copies on each way."""
        before = self.mark()
        self.fetch(slot, memory, source)
        return [(before, self.mark())]

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks; wait until both have been reached."""
        return later - earlier


class StreamCopier(SlotCopier):
    """Copies on CUDA streams of its own, one for each way, from pinned memory and other devices.

    Create it after the slots. It records what the current stream has enqueued, so that the first
    copies wait for whatever used that memory before: the caching allocator reuses blocks.

    Args: channels: the ways on which experts come to the device.
    """

    def __init__(self, gpu: CudaDevice, slots: int, channels: Iterable[str]) -> None:
        self._gpu = gpu
        self._streams = {channel: gpu.new_stream() for channel in sorted(channels)}
        self._filled_events = [
            {channel: gpu.new_event() for channel in self._streams} for _ in range(slots)
        ]
        self._used_events = [gpu.new_event() for _ in range(slots)]
        for slot in range(slots):
            self.note_use(slot)

    def fetch(self, slot: int, memory: torch.Tensor, source: PackedExperts) -> None:
        for channel in self._streams:
            self._wait_until_free(slot, channel)
            self._copy(slot, channel, memory, source)

    def _wait_until_free(self, slot: int, channel: str) -> None:
        self._streams[channel].wait_event(self._used_events[slot])

    def _copy(self, slot: int, channel: str, memory: torch.Tensor, source: PackedExperts) -> None:
        stream = self._streams[channel]
        for target, run in source.copies(memory, channel):
            self._gpu.copy(stream, target, run)
        self._filled_events[slot][channel].record(stream)

    def wait(self, slot: int) -> None:
        for event in self._filled_events[slot].values():
            self._gpu.current_stream().wait_event(event)

    def note_use(self, slot: int) -> None:
        self._used_events[slot].record(self._gpu.current_stream())

    def mark(self) -> torch.cuda.Event:
        return self._mark_on(self._gpu.current_stream())

    def timed_fetch(self, slot: int, memory: torch.Tensor, source: PackedExperts) -> list[Marks]:
        marks: list[Marks] = []
        for channel, stream in self._streams.items():
            # The copy's time begins when the slot is free; the wait before that is computing time.
            self._wait_until_free(slot, channel)
            before = self._mark_on(stream)
            self._copy(slot, channel, memory, source)
            marks.append((before, self._mark_on(stream)))
        return marks

    def _mark_on(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._gpu.new_event(timed=True)
        event.record(stream)
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()
        return earlier.elapsed_time(later) / 1000


class ForwardClock:
    """Collects marks of one forward: when layers computed with their experts, and copies ran.

    Only a forward for which that was asked is timed, so that the others have no overhead.

    Args:
        tokens: number of tokens in the forward.
        copier: makes the marks.
        copies_overlap: whether copies run while experts compute, as with two slots or more.

    Attributes:
        starts, ends: marks before and after each layer's computation with its experts.
        copies: marks before and after each layer's copies on one way, as enqueued in this forward.
    """

    def __init__(self, tokens: int, copier: SlotCopier, *, copies_overlap: bool) -> None:
        self._tokens = tokens
        self._copier = copier
        self._copies_overlap = copies_overlap
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.copies: list[Marks] = []

    def times(self) -> LayerTimes | None:
        """Return the forward's times; ``None`` if it had fewer than two layers or copied nothing.

        ``window`` runs from the first layer's computation with experts to the start of the second
        one's. The first layer's experts never leave the device, so that no waiting for a copy is in
        it (MoE-Prefill §B.4 measures layer 0 for the same reason). With one slot a copy cannot
        begin before the experts have computed, so ``window`` then begins at their end. ``transfer``
        is the time of the slowest copy.
        """
        if len(self.starts) < 2 or not self.copies:
            return None
        window_start = self.starts[0] if self._copies_overlap else self.ends[0]
        return LayerTimes(
            tokens=self._tokens,
            window=self._copier.seconds(window_start, self.starts[1]),
            transfer=max(self._copier.seconds(*marks) for marks in self.copies),
        )
