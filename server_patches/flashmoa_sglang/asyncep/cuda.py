"""Every call to CUDA that the offloader makes; tests put a fake in the place of ``CudaDevice``."""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager
from typing import Any

import torch


class CudaDevice:
    """Streams and events of a GPU.

    A stream does its work in the order in which it was enqueued. It waits for another stream only
    by ``stream.wait_event(event)``: for what ``event.record(stream)`` has seen enqueued, or for
    nothing if the event was not recorded yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def of(cls, device: torch.device) -> CudaDevice | None:
        """Return the GPU with this device; ``None`` if it is none."""
        return cls(device) if device.type == "cuda" else None

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream on which SGLang computes, or that of the innermost :meth:`on`."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Enqueue copies inside this context on a stream."""
        return torch.cuda.stream(stream)

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)


def pinned_memory(size: int) -> torch.Tensor:
    """Allocate ``size`` bytes (uint8) of pinned memory; torch would round up to a power of two.

    Raises: SystemExit if CUDA does not pin them. The process cannot continue then: torch would see
        CUDA's error at its next kernel.
    """
    # The mapping is shared and populated, so that a later write does not replace a pinned page.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    code = cudart.cudaHostRegister(memory.data_ptr(), size, 0)
    if int(code) != 0:
        raise SystemExit(
            f"--flashmoa-asyncep h2d: CUDA does not pin {size} bytes of host memory "
            f"({cudart.cudaGetErrorString(code)}). Give the host memory for all experts but "
            "the first layer's, and raise the container's limit on locked memory (ulimit -l)."
        )
    return memory
