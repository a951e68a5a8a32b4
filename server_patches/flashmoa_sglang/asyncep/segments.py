"""Memory that processes share: without a name, and sealed once it is filled.

A memfd of Linux (memfd_create(2)). Whoever maps it keeps it alive, and the kernel frees it with the
last of them, however they ended: there is no name to unlink. Nor does a container's limit on
/dev/shm count for it. Its seals (fcntl(2), "File Sealing") forbid everybody to change it or to cut
it short, so that a reader depends on nobody.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable

import torch

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed(pieces: Iterable[torch.Tensor]) -> int:
    """A file descriptor of memory with these pieces (uint8, on the CPU), one behind the other."""
    segment = os.memfd_create("flashmoa-experts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(segment, "wb", closefd=False) as file:
            for piece in pieces:
                file.write(memoryview(piece.numpy()))
        fcntl.fcntl(segment, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(segment)
        raise
    return segment


def mapped(segment: int, size: int) -> torch.Tensor:
    """What a segment of ``size`` bytes holds (uint8); it stays when the descriptor is closed.

    Raises: ValueError where its size is another, or somebody could still change it.
    """
    if (found := os.fstat(segment).st_size) != size:
        raise ValueError(f"the segment has {found} bytes instead of {size}")
    if fcntl.fcntl(segment, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the segment is not sealed")
    # Copy on write, although nobody writes: torch wants memory that it may write to.
    return torch.frombuffer(mmap.mmap(segment, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
