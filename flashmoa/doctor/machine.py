"""Check the machine (``check_system``, ``check_machine``): compiler, accelerator, memory."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from flashmoa.doctor.findings import Finding, fix, note, ok

_GIB = 2**30
_DEVICES = Path("/dev")
# Those of NVIDIA's driver, of WSL 2 and of ROCm.
_GPUS = ("nvidia[0-9]*", "dxg", "kfd")
# Bytes that an engine's three processes take together, with a tiny model on a CPU.
_MIN_MEMORY = 3 * _GIB
# Docker's default of 64 MiB is too little for tensor-parallel ranks.
_MIN_SHARED_MEMORY = _GIB // 2


def runs_engines() -> bool:
    """Return whether SGLang runs on this system at all."""
    return sys.platform.startswith("linux")


def check_system() -> list[Finding]:
    """Check Python and the operating system."""
    python = ok("Python", platform.python_version())
    if runs_engines():
        return [python, ok("system", f"{platform.system()} {platform.machine()}")]
    text = f"SGLang runs on Linux only; {platform.system()} can run the client library"
    return [python, note("system", text, "run the engine on a Linux machine, or in WSL or Docker")]


def check_machine() -> list[Finding]:
    """Check for everything that an engine needs except Python packages."""
    return [_check_compiler(), *_check_accelerator(), _check_memory(), *_check_shared_memory()]


def compiler() -> str | None:
    """Return the path of a C compiler, ``None`` if there is none.

    It is the one that the environment variable ``CC`` names, otherwise cc, gcc or clang.
    """
    names = [os.environ["CC"].split()[0]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def _check_compiler() -> Finding:
    path = compiler()
    if path is not None:
        return ok("C compiler", path)
    text = "there is none, and SGLang compiles kernels when they are first used"
    return fix("C compiler", text, "apt-get install gcc")


def accelerators() -> list[str]:
    """Return the names of the system's GPU devices."""
    return [path.name for name in _GPUS for path in sorted(_DEVICES.glob(name))]


def _check_accelerator() -> list[Finding]:
    devices = accelerators()
    build = _torch_build()
    if build is None:
        remedy = "make setup (CPU), or install SGLang, which installs torch (GPU)"
        return [fix("torch", "it is not installed", remedy)]
    version, runtime = build
    torch = ok("torch", f"{version}, {runtime or 'without CUDA'}")
    if not devices:
        text = "there is none: engines run on the plugin's CPU platform"
        return [torch, note("GPU", text)]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        text = "CUDA_VISIBLE_DEVICES is empty: no GPU is used"
        return [torch, note("GPU", text, "unset CUDA_VISIBLE_DEVICES")]
    if runtime is None:
        text = f"{', '.join(devices)} found, but this torch is built without CUDA"
        index = "https://download.pytorch.org/whl/cu128"
        remedy = f"pip install --force-reinstall torch --index-url {index}"
        if devices[0].startswith("nvidia"):
            return [torch, fix("GPU", text, remedy)]
        # These devices are there with GPUs, too, that SGLang does not support.
        remedy = f"for an NVIDIA GPU: {remedy}; for AMD's, install SGLang for ROCm"
        return [torch, note("GPU", f"{text} or ROCm", remedy)]
    return [torch, ok("GPU", ", ".join(devices))]


def _torch_build() -> tuple[str, str | None] | None:
    """Return the version of torch, and the name and version of its CUDA or ROCm if it has one.

    Returns: ``None`` if torch is not installed.

    They are read from a file, since importing torch takes seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    version = re.search(r"__version__ = '([^']+)'", text)
    found = re.search(r"^(cuda|hip)\b[^=]*= '([^']+)'", text, re.MULTILINE)
    runtime = f"{'CUDA' if found[1] == 'cuda' else 'ROCm'} {found[2]}" if found else None
    return version[1] if version else "?", runtime


def _check_memory() -> Finding:
    free = available_memory()
    if free is None:
        return note("memory", "the system does not report how much is free")
    text = f"{free / _GIB:.1f} GiB free"
    if free >= _MIN_MEMORY:
        return ok("memory", text)
    text += f"; an engine with a tiny model on a CPU needs {_MIN_MEMORY / _GIB:g} GiB"
    remedy = "end other programs, or limit a CPU engine's KV pool with --max-total-tokens N"
    return note("memory", text, remedy)


def available_memory() -> int | None:
    """Return how many bytes are available on the machine and within the container's limit.

    Returns: ``None`` if the system reports neither.
    """
    meminfo = _read(Path("/proc/meminfo"))
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    bounds = [int(available[1]) * 1024] if available else []
    group = Path("/sys/fs/cgroup")
    limit, used = _read(group / "memory.max"), _read(group / "memory.current")
    if used and limit.strip().isdigit():
        # The page cache counts as used, but gives way to programs.
        cache = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
        free = int(limit) - int(used) + (int(cache[1]) if cache else 0)
        bounds.append(max(0, min(int(limit), free)))
    return min(bounds, default=None)


def _read(path: Path) -> str:
    """Return a file's text, empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _check_shared_memory() -> list[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return []
    text = f"{free / _GIB:.1f} GiB free in /dev/shm"
    if free >= _MIN_SHARED_MEMORY:
        return [ok("shared memory", text)]
    return [note("shared memory", f"{text}; several GPUs need more", "docker run --shm-size 8g")]
