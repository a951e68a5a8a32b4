"""Segments: memory for a part of a replica's share, which other processes map by its descriptor.

A segment is memory of a GPU (cuMemExportToShareableHandle), or a memfd of Linux (memfd_create(2)).
Each process that maps it keeps it alive, and it is freed with the last of them. It has no name that
would have to be unlinked, and a container's limit on /dev/shm does not apply.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from flashmoa_sglang.asyncep.cuda import CudaDevice

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostSegment:
    """A segment of host memory that is written once; its size is sealed (fcntl(2)).

    Without a GPU, its content is sealed, too. CUDA pins only what a process could also write.

    Args: size: in bytes; that much has to be appended.
    """

    def __init__(self, size: int, gpu: CudaDevice | None = None) -> None:
        self.descriptor = os.memfd_create("flashmoa-experts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._size, self._gpu = size, gpu

    def append(self, piece: torch.Tensor) -> None:
        """Write a piece (uint8, on the CPU) behind what has been written."""
        with open(self.descriptor, "ab", closefd=False) as file:
            file.write(memoryview(piece.numpy()))  # pyright: ignore[reportArgumentType]

    def finish(self) -> torch.Tensor:
        """Seal and map the segment."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals(self._gpu))
        return map_segment(self.descriptor, self._size, self._gpu)


def map_segment(descriptor: int, size: int, gpu: CudaDevice | None = None) -> torch.Tensor:
    """Map a segment of host memory with ``size`` bytes (uint8), and pin it if there is a GPU.

    The map stays valid when the descriptor is closed.

    Raises: ValueError if the segment has another size, or a process could still change it.
    """
    if (actual_size := os.fstat(descriptor).st_size) != size:
        raise ValueError(
            f"the segment has {actual_size} bytes instead of {size}; start all replicas with "
            "the same model and version of flashmoa-sglang"
        )
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals(gpu) != _seals(gpu):
        raise ValueError(
            "the segment is not sealed, so that it could still change; start all replicas "
            "with the same version of flashmoa-sglang"
        )
    # Copy on write, although nothing is written: torch requires writable memory. With it, CUDA
    # would pin a copy of each page.
    access = mmap.ACCESS_COPY if gpu is None else mmap.ACCESS_WRITE
    memory = torch.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=torch.uint8)
    if gpu is not None:
        gpu.pin(memory)
    return memory


def _seals(gpu: CudaDevice | None) -> int:
    return _SIZE_SEALS | (fcntl.F_SEAL_WRITE if gpu is None else 0)


class GpuSegment:
    """A segment of a GPU's memory, with the methods of ``HostSegment``."""

    def __init__(self, size: int, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self.descriptor, self._memory = gpu.allocate_share(size)
        self._end = 0

    def append(self, piece: torch.Tensor) -> None:
        """Write a piece, and wait until that is done.

        The caller may free the piece then, and other processes do not see this one's streams.
        """
        start, self._end = self._end, self._end + piece.nbytes
        self._gpu.copy(self._gpu.current_stream(), self._memory[start : self._end], piece)
        self._gpu.synchronize()

    def finish(self) -> torch.Tensor:
        return self._memory
