"""The slots on the device: whose experts are where, how they come there, how long it takes."""

from __future__ import annotations

import time
from typing import Any

import torch

from flashmoa_sglang.asyncep.experts import ExpertSource
from flashmoa_sglang.saturation import LayerTimes


class Rotation:
    """Slots for the experts of some layers, numbered in the order of a forward.

    At first the first layers are in the slots. Layers may be asked for in any order; the one that
    is expected costs nothing.
    """

    def __init__(self, layers: int, slots: int) -> None:
        if layers < 1 or slots < 1:
            raise ValueError(f"{layers} layers in {slots} slots: at least one of each is needed")
        self._layers = layers
        self.slots: list[int] = list(range(min(layers, slots)))
        # Layers that were asked for and were not there.
        self.misses = 0

    def slot(self, layer: int) -> int | None:
        """Return where a layer is; ``None`` if it is nowhere."""
        return self.slots.index(layer) if layer in self.slots else None

    def miss(self, layer: int) -> int:
        """Give a layer that is nowhere the slot of the one that is needed last from here."""
        self.misses += 1
        slot = max(range(len(self.slots)), key=lambda at: self._ahead(layer, self.slots[at]))
        self.slots[slot] = layer
        return slot

    def done(self, layer: int) -> tuple[int, int] | None:
        """Note that a layer has been computed; return the slot it leaves, and the layer to come.

        Returns ``None`` where every layer has a slot of its own.
        """
        if len(self.slots) == self._layers:
            return None
        slot = self.slots.index(layer)
        coming = (layer + 1) % self._layers
        while coming in self.slots:
            coming = (coming + 1) % self._layers
        self.slots[slot] = coming
        return slot, coming

    def _ahead(self, layer: int, other: int) -> int:
        """Return how many layers after ``layer`` another one is needed."""
        return (other - layer) % self._layers


class Copying:
    """Copies from sources into slots, at once: for devices without streams.

    All calls are in the order of the computation. A mark is a point of time in that order.
    """

    def fetch(self, slot: int, memory: torch.Tensor, source: ExpertSource) -> None:
        """Begin to fill a slot, once what was computed with it so far is done."""
        source.fill(memory)

    def wait(self, slot: int) -> None:
        """Have what is computed from now on see the slot filled."""

    def used(self, slot: int) -> None:
        """Note that what has been computed up to now has used the slot."""

    def mark(self) -> Any:
        """Mark where the computation is."""
        return time.perf_counter()

    def timed_fetch(self, slot: int, memory: torch.Tensor, source: ExpertSource) -> tuple[Any, Any]:
        """Fetch, and mark when the copy begins and ends."""
        before = self.mark()
        self.fetch(slot, memory, source)
        return before, self.mark()

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks; wait until both have been reached."""
        return later - earlier


class StreamCopying(Copying):
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

    def fetch(self, slot: int, memory: torch.Tensor, source: ExpertSource) -> None:
        self._stream.wait_event(self._used[slot])
        with torch.cuda.stream(self._stream):
            source.fill(memory)
            self._filled[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])

    def used(self, slot: int) -> None:
        self._used[slot].record(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event:
        return _recorded(torch.cuda.current_stream(self._device))

    def timed_fetch(
        self, slot: int, memory: torch.Tensor, source: ExpertSource
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        # Not from before the slot is free: that wait is the computation's.
        self._stream.wait_event(self._used[slot])
        before = _recorded(self._stream)
        self.fetch(slot, memory, source)
        return before, _recorded(self._stream)

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()
        return earlier.elapsed_time(later) / 1000


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class ForwardClock:
    """When the layers of one forward computed with their experts, and when these came.

    A forward is timed only where that was asked for; the others pay nothing.

    Args:
        tokens: of the forward.
        copying: makes the marks.
        beside_experts: copies go on while experts compute, as they do with two slots or more.

    Attributes: marks, layer by layer, and of the copies that were begun meanwhile.
    """

    def __init__(self, tokens: int, copying: Copying, *, beside_experts: bool) -> None:
        self._tokens = tokens
        self._copying = copying
        self._beside_experts = beside_experts
        self.began: list[Any] = []
        self.ended: list[Any] = []
        self.copies: list[tuple[Any, Any]] = []

    def times(self) -> LayerTimes | None:
        """Return ``None`` where the forward had fewer than two layers, or nothing was copied.

        The first layer waits for nothing, as its experts stay on the device: from there to the
        second one's is what a layer computes (§B.4: layer 0).
        """
        if len(self.began) < 2 or not self.copies:
            return None
        from_there = self.began[0] if self._beside_experts else self.ended[0]
        return LayerTimes(
            tokens=self._tokens,
            window=self._copying.seconds(from_there, self.began[1]),
            transfer=max(self._copying.seconds(*copy) for copy in self.copies),
        )
