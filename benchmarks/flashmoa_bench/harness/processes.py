"""Read what the processes of a started engine take, from ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_SCHEDULER = b"sglang::scheduler"
# Fields of ``/proc/PID/stat`` behind the process's name: seconds in the program and in the kernel.
_PROGRAM_TICKS, _KERNEL_TICKS = 11, 12


def cpu_seconds(leader: int) -> tuple[float, float]:
    """Return the CPU seconds so far of an engine's HTTP process, and of its schedulers together.

    Args:
        leader: process id of the HTTP process, which leads the session of the engine's processes.

    Raises: OSError if there is no such process, or no ``/proc``.
    """
    http = process_cpu_seconds(leader)
    return http, sum(process_cpu_seconds(int(process.name)) for process in _schedulers(leader))


def process_cpu_seconds(process: int) -> float:
    """Return the CPU seconds so far of the process with this id.

    Raises: OSError if there is no such process, or no ``/proc``.
    """
    # The name is in parentheses and may have spaces and parentheses itself.
    fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[_PROGRAM_TICKS]) + int(fields[_KERNEL_TICKS])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_resident(leader: int) -> int | None:
    """Return the most memory, in bytes, that an engine's scheduler process ever had resident.

    Args:
        leader: process id of the leader of the session that the engine's processes belong to.

    ``None`` if there is no such process, or no ``/proc``.
    """
    peaks = [_peak_of_process(process) for process in _schedulers(leader)]
    return max((peak for peak in peaks if peak is not None), default=None)


def _schedulers(leader: int) -> Iterator[Path]:
    for process in _PROC.glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) != leader:
                continue
            if (process / "cmdline").read_bytes().startswith(_SCHEDULER):
                yield process
        except OSError:
            continue  # The process has just ended, or belongs to another user.


def _peak_of_process(process: Path) -> int | None:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    # The line reads, for example, "VmHWM:     1024 kB".
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
