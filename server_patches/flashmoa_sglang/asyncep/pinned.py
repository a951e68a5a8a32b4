"""Host memory that a GPU copies from beside its computation, and no more of it than asked for."""

from __future__ import annotations

import mmap

import torch


def pinned(size: int) -> torch.Tensor:
    """``size`` bytes (uint8), pinned; torch's own pinned memory comes in powers of two.

    Raises: SystemExit where CUDA does not pin them; it leaves an error behind that torch would
        find at its next kernel, so that there is no other way to go on.
    """
    # Shared and populated, so that the pages which are pinned are those that are written to later.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(memory.data_ptr(), size, 0)
    if int(code) != 0:
        raise SystemExit(
            f"--flashmoa-asyncep h2d: CUDA does not pin {size} bytes of host memory "
            f"({cudart.cudaGetErrorString(code)}). The host needs memory for all experts but the "
            "first layer's, and the container a limit on locked memory (ulimit -l) that allows it."
        )
    return memory
