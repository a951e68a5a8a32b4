"""``VirtualGpu``: a modelled GPU's streams and copies, below the real ``ExpertOffloader``.

CUDA fixes only the order of work: within a stream, and by events between streams. So a stream is a
number, the second when its work ends. A wait takes the maximum, and a copy adds bytes over
bandwidth. A computation reads the bytes of the copies that have ended by then. So a missing wait
changes what a model reads, and it is counted as a race even if the time would have sufficed.
"""

from __future__ import annotations

import heapq
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import torch

from flashmoa_bench.modelled_gpu.gpu import Gpu, LayerSeconds


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of copies to a GPU.

    Attributes:
        host: from pinned host memory, over PCIe.
        peers: from the memory of other GPUs, over NVLink.
        own: from the GPU's own memory, which is read and written.
    """

    host: float
    peers: float
    own: float

    @classmethod
    def of(cls, gpu: Gpu, scale: float = 1.0) -> Bandwidths:
        """Return the bandwidths that copies reach.

        Args: scale: number of the modelled model's bytes that a byte here stands for.

        Raises: ValueError if the data sheet has no PCIe or NVLink.
        """
        if not gpu.pcie or not gpu.nvlink:
            raise ValueError(
                f"The data sheet of {gpu.name} has no pcie or nvlink, which copies of experts "
                "need: add both, in bytes per second and one direction."
            )
        share = gpu.copy_efficiency / scale
        return cls(gpu.pcie * share, gpu.nvlink * share, gpu.bandwidth / 2 * share)


class VirtualEvent:
    """A point in a stream's work; before it is recorded, nothing waits for it."""

    def __init__(self) -> None:
        self._at = 0.0
        self.steps: dict[int, int] = {}

    @property
    def at(self) -> float:
        """The second when the recorded work has ended."""
        return self._at

    def record(self, stream: VirtualStream) -> None:
        self._at, self.steps = stream.ends, dict(stream.steps)

    def synchronize(self) -> None:
        """Do nothing: the moment is known."""

    def elapsed_time(self, later: VirtualEvent) -> float:
        """Return the milliseconds until another event, as CUDA's events do."""
        return (later.at - self._at) * 1000


class VirtualStream:
    """Work in the order of enqueueing.

    Attributes:
        ends: the second when all enqueued work has ended.
        steps: a vector clock: by stream, how many of its steps end before this stream's next step.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends = 0.0
        self.steps: dict[int, int] = {}

    def wait_event(self, event: VirtualEvent) -> None:
        self.ends = max(self.ends, event.at)
        for number, steps in event.steps.items():
            self.steps[number] = max(steps, self.steps.get(number, 0))

    def enqueue(self, seconds: float) -> int:
        """Enqueue a step; return its number in this stream."""
        self.ends += seconds
        self.steps[self.number] = step = self.steps.get(self.number, 0) + 1
        return step


@dataclass(frozen=True, slots=True)
class _Access:
    """Kinds of access to a range of bytes, of which the last one is kept."""

    stream: int
    first: int
    end: int
    writes: bool

    def conflicts(self, other: _Access) -> bool:
        overlap = self.first < other.end and other.first < self.end
        return overlap and (self.writes or other.writes)


class VirtualGpu:
    """Has the methods of the plugin's ``CudaDevice``.

    Args: place: the GPU's name, different in each replica.

    Attributes:
        layer: the times of a layer in the forward that is being enqueued.
        races: number of accesses that do not wait for an earlier access to the same bytes, where
            one of the two writes.
    """

    def __init__(self, bandwidths: Bandwidths, place: str = "GPU-0") -> None:
        self.place = place
        self.layer = LayerSeconds()
        self.races = 0
        self._bandwidths = bandwidths
        self._streams: list[VirtualStream] = []
        self._main = self.new_stream()
        # Bandwidths of copies from memory that is not pinned host memory, by its address.
        self._sources: dict[int, float] = {}
        # The last step of each kind of access, by address of the memory.
        self._accesses: dict[int, dict[_Access, int]] = {}
        # Copies that have not landed: when they end, a number that keeps their order, their bytes.
        self._copies: list[tuple[float, int, torch.Tensor, torch.Tensor]] = []
        self._numbers = count()

    @property
    def now(self) -> float:
        """The second when all enqueued computation has ended."""
        return self._main.ends

    def begin(self, layer: LayerSeconds, second: float = 0.0) -> None:
        """Begin a forward with these times, and no earlier than at this second."""
        self.layer = layer
        self._main.ends = max(self._main.ends, second)

    def compute_others(self) -> None:
        """Enqueue a layer's computation before its experts."""
        self._main.enqueue(self.layer.others)

    def compute_experts(self, weights: Iterable[torch.Tensor]) -> None:
        """Enqueue a layer's computation with its experts, which reads their weights all the time.

        After the call, the weights have the bytes that the GPU would read.
        """
        self._land(self._main.ends)
        step = self._main.enqueue(self.layer.experts)
        for tensor in weights:
            self._note(self._main, tensor, step, writes=False)

    def new_stream(self) -> VirtualStream:
        self._streams.append(VirtualStream(len(self._streams)))
        return self._streams[-1]

    def current_stream(self) -> VirtualStream:
        return self._main

    def new_event(self, *, timed: bool = False) -> VirtualEvent:
        del timed
        return VirtualEvent()

    def copy(self, stream: VirtualStream, target: torch.Tensor, source: torch.Tensor) -> None:
        bandwidth = self._sources.get(_address(source), self._bandwidths.host)
        step = stream.enqueue(source.nbytes / bandwidth)
        self._note(stream, source, step, writes=False)
        self._note(stream, target, step, writes=True)
        heapq.heappush(self._copies, (stream.ends, next(self._numbers), target, source))

    def synchronize(self) -> None:
        """End all streams' work before everything that is enqueued from now on."""
        everything = self.new_event()
        for stream in self._streams:
            everything.record(stream)
            self._main.wait_event(everything)
        everything.record(self._main)
        for stream in self._streams:
            stream.wait_event(everything)
        self._land(self._main.ends)

    def pinned_memory(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def free_host_cache(self) -> None:
        """Do nothing: this memory is not pinned."""

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing: all memory is pinned host memory, unless it is a share."""

    def allocate_share(self, size: int) -> tuple[int, torch.Tensor]:
        descriptor = os.memfd_create(self.place)
        os.ftruncate(descriptor, size)
        return descriptor, self.map_share(descriptor, size, self.place)

    def map_share(self, descriptor: int, size: int, place: str) -> torch.Tensor:
        memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        is_own = place == self.place
        self._sources[_address(memory)] = self._bandwidths.own if is_own else self._bandwidths.peers
        return memory

    def _note(
        self, stream: VirtualStream, tensor: torch.Tensor, step: int, *, writes: bool
    ) -> None:
        """Note a step's access to a tensor, and count the races with earlier accesses."""
        accesses = self._accesses.setdefault(_address(tensor), {})
        first = int(tensor.storage_offset()) * tensor.itemsize
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        access = _Access(stream.number, first, first + span * tensor.itemsize, writes)
        self.races += sum(
            access.conflicts(earlier) and stream.steps.get(earlier.stream, 0) < done
            for earlier, done in accesses.items()
        )
        accesses[access] = step

    def _land(self, second: float) -> None:
        """Write the bytes of the copies that end by a second."""
        while self._copies and self._copies[0][0] <= second:
            _, _, target, source = heapq.heappop(self._copies)
            target.copy_(source)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
