"""What an engine's scheduler process has taken of this machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_SCHEDULER = "sglang::scheduler"


def peak_resident(leader: int) -> int | None:
    """The most memory, in bytes, that an engine's scheduler ever had resident.

    Args:
        leader: of the session that all processes of the engine are in.

    ``None`` where there is no such process, or no ``/proc``.
    """
    peaks = [_high_water(process) for process in _schedulers(leader)]
    return max((peak for peak in peaks if peak is not None), default=None)


def _schedulers(leader: int) -> Iterator[Path]:
    for process in _PROC.glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader and _is_scheduler(process):
                yield process
        except OSError:
            continue  # It has ended meanwhile, or is somebody else's.


def _is_scheduler(process: Path) -> bool:
    return (process / "cmdline").read_bytes().startswith(_SCHEDULER.encode())


def _high_water(process: Path) -> int | None:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    # As in "VmHWM:     1024 kB".
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
