"""A layer with experts, and a fake GPU, whose streams run in any order that CUDA allows."""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class ExpertLayer(torch.nn.Module):
    """The parts of a layer with experts that an offloader uses.

    Args: values: one for each of its three tensors, which is filled with it.
    """

    w13_scale: torch.Tensor

    def __init__(self, experts: int, values: Sequence[float] = (0, 0, 0)) -> None:
        super().__init__()
        self.num_local_experts = experts
        self.w13_weight = torch.nn.Parameter(torch.empty(experts, 3, 2), requires_grad=False)
        self.register_buffer("w13_scale", torch.empty(experts))
        self.bias = torch.empty(experts, 2, dtype=torch.int8)
        self.load(values)

    def load(self, values: Sequence[float]) -> None:
        tensors = (self.w13_weight.data, self.w13_scale, self.bias)
        for value, tensor in zip(values, tensors, strict=True):
            tensor.fill_(value)

    def compute(self, times: float = 1) -> list[float]:
        means = [t.float().mean().item() for t in (self.w13_weight, self.w13_scale, self.bias)]
        return [times * mean for mean in means]


class FakeStream:
    """A queue of work, and of conditions that must hold before the following work runs."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], bool | None]] = deque()
        self.done = self.enqueued = 0

    def enqueue(self, step: Callable[[], bool | None]) -> None:
        """Enqueue work, or a condition, which returns ``False`` until it holds."""
        self._queue.append(step)
        self.enqueued += 1

    def wait_event(self, event: "FakeEvent") -> None:
        # As in CUDA, only records before this call count.
        self.enqueue(event.reached)

    def step(self) -> bool:
        """Do the next step. Return whether there was one that could be done."""
        if not self._queue or self._queue[0]() is False:
            return False
        self._queue.popleft()
        self.done += 1
        return True


class FakeEvent:
    reached: Callable[[], bool] = staticmethod(lambda: True)

    def record(self, stream: FakeStream) -> None:
        position = stream.enqueued
        self.reached = lambda: stream.done >= position


class FakeGpu:
    """Has the methods of ``CudaDevice``. What processes share is in real segments of host memory.

    Args:
        place: the GPU's name.
        reaches: the GPUs whose memory this one can read, besides its own.

    Attributes:
        main: the stream of the layers.
        streams: all streams, ``main`` first.
        pinned: the pinned host memory.
    """

    def __init__(self, place: str = "GPU-0", reaches: Iterable[str] = ()) -> None:
        self.place = place
        self._reaches = {place, *reaches}
        self.main = FakeStream()
        self.streams = [self.main]
        self.freed_host_caches = 0
        self.pinned: list[torch.Tensor] = []

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.main

    def new_event(self, *, timed: bool = False) -> Any:
        del timed
        return FakeEvent()

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy, as two pieces."""
        half = source.nbytes // 2
        for part in (slice(0, half), slice(half, None)):
            stream.enqueue(lambda part=part: target[part].copy_(source[part]))

    def synchronize(self) -> None:
        self.run()

    def free_host_cache(self) -> None:
        self.freed_host_caches += 1

    def pinned_memory(self, size: int) -> torch.Tensor:
        memory = torch.zeros(size, dtype=torch.uint8)
        self.pin(memory)
        return memory

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned.append(memory)

    def allocate_share(self, size: int) -> tuple[int, torch.Tensor]:
        descriptor = os.memfd_create(self.place)
        os.ftruncate(descriptor, size)
        return descriptor, self.map_share(descriptor, size, self.place)

    def map_share(self, descriptor: int, size: int, place: str) -> torch.Tensor:
        if place not in self._reaches:
            raise ValueError(f"{self.place} cannot read the memory of {place}")
        assert os.fstat(descriptor).st_size == size
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    def run(self, choices: Sequence[int] = ()) -> None:
        """Do all that was enqueued.

        Args: choices: for each step, which stream is tried first; the last one for all that follow.

        Raises: AssertionError if the streams wait for each other.
        """
        turn = 0
        while any(stream.done < stream.enqueued for stream in self.streams):
            first = choices[min(turn, len(choices) - 1)] if choices else 0
            turn += 1
            count = len(self.streams)
            order = [self.streams[(first + offset) % count] for offset in range(count)]
            assert any(stream.step() for stream in order), "the streams wait for each other"
