"""How much memory the host can still give, and an end of the start where that is too little."""

from __future__ import annotations

from pathlib import Path

import psutil

_GIB = 1 << 30
# What the kernel frees before it kills a process: cached files, and its own caches.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


def require(size: int, purpose: str, available: int | None = None) -> None:
    """End the start unless the host can give ``size`` bytes.

    Args:
        purpose: what they are for; begins the message.
        available: bytes that the host can give; by default, that is looked up.

    Raises: SystemExit if it cannot; otherwise the kernel would kill a process later on.
    """
    if available is None:
        available = available_bytes()
    if size > available:
        raise SystemExit(
            f"--flashmoa-asyncep: {purpose} {size / _GIB:.1f} GiB of host memory, but this machine "
            f"or container has {available / _GIB:.1f} GiB left. Give it more, take a checkpoint in "
            "FP8, or start without --flashmoa-asyncep on more GPUs (--tp-size)."
        )


def available_bytes(root: Path = Path("/")) -> int:
    """Return what the machine has left, or the container (cgroup v2), if that is less."""
    limits = [psutil.virtual_memory().available]
    try:
        path = (root / "proc/self/cgroup").read_text().partition("0::/")[2].strip()
    except OSError:
        return limits[0]
    top = root / "sys/fs/cgroup"
    folder = top / path
    for group in (folder, *folder.parents):
        if not group.is_relative_to(top):
            break
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        except (OSError, ValueError):
            continue  # No limit, or not told here.
        limits.append(limit - used + sum(int(statistics.get(name, 0)) for name in _RECLAIMABLE))
    return max(0, min(limits))
