"""Check the packages and the machine (``check_installation``).

SGLang and torch are not imported, which would take half a minute. The internals of SGLang that the
plugin uses are looked up in SGLang's source.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import flashmoa
from flashmoa.doctor.findings import Finding, fix, note, ok

_PLUGIN = "flashmoa"
_INSTALL_PLUGIN = "pip install ./server_patches"
_AUTOGEN = ("autogen-core", "autogen-agentchat", "autogen-ext")
_GIB = 2**30
_DEVICES = Path("/dev")
# Those of NVIDIA's driver, of WSL 2 and of ROCm.
_GPUS = ("nvidia[0-9]*", "dxg", "kfd")
# Bytes that an engine's three processes take together, with a tiny model on a CPU.
_MIN_MEMORY = 3 * _GIB


def check_installation() -> list[Finding]:
    """Check everything on this machine that a client or an engine needs."""
    findings = [*check_system(), ok("flashmoa", flashmoa.__version__), check_autogen()]
    if not runs_engines():
        return findings
    if installed("sglang") is not None:
        findings += [_check_compiler(), *_check_accelerator(), _check_memory()]
    return [*findings, *check_plugin(), *check_environment()]


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, ``None`` if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_autogen() -> Finding:
    """Check the packages that ``flashmoa.autogen`` needs."""
    missing = [name for name in (*_AUTOGEN, "openai") if installed(name) is None]
    if not missing:
        return ok("AutoGen", installed(_AUTOGEN[0]) or "")
    text = f"not installed: {', '.join(missing)}; only flashmoa.autogen needs that"
    return note("AutoGen", text, "pip install 'flashmoa[autogen]'")


def check_plugin() -> list[Finding]:
    """Check SGLang, the plugin, and whether they fit each other."""
    sglang, plugin = installed("sglang"), installed("flashmoa-sglang")
    if sglang is None and plugin is None:
        text = "neither SGLang nor the plugin is installed: engines have to run elsewhere"
        return [note("SGLang", text, "give --engine URL to check one")]
    if sglang is None:
        remedy = f"make setup (CPU), or {_install_command()} (GPU)"
        return [fix("SGLang", "the plugin is installed, but SGLang is not", remedy)]
    if plugin is None:
        text = "SGLang is installed, but flashmoa-sglang is not: engines started here cannot link"
        return [ok("SGLang", sglang), fix("plugin", text, _INSTALL_PLUGIN)]
    return [check_release(sglang), _check_version(plugin), *check_internals()]


def _check_version(plugin: str) -> Finding:
    if plugin == flashmoa.__version__:
        return ok("plugin", f"flashmoa-sglang {plugin}")
    text = f"flashmoa-sglang is {plugin}, but flashmoa is {flashmoa.__version__}"
    return fix("plugin", text, f"{_INSTALL_PLUGIN} . (both from one checkout)")


def check_environment() -> list[Finding]:
    """Check SGLang's environment variables that keep the plugin out."""
    findings: list[Finding] = []
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if excludes_plugin(allowed):
        text = f"SGLANG_PLUGINS={allowed} keeps the plugin out"
        findings.append(fix("environment", text, "unset SGLANG_PLUGINS, or add flashmoa to it"))
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if platform not in ("", "flashmoa_cpu"):
        text = f"SGLANG_PLATFORM={platform} keeps out plugins with other platforms"
        findings.append(fix("environment", text, "unset SGLANG_PLATFORM"))
    return findings


def excludes_plugin(allowed: str) -> bool:
    """Return whether a value of ``SGLANG_PLUGINS``, a list of names, keeps the plugin out."""
    names = {name.strip() for name in allowed.split(",")} - {""}
    return bool(names) and _PLUGIN not in names


def check_release(release: str) -> Finding:
    """Check whether the plugin was tested with this release of SGLang."""
    releases = _plugin("releases")
    tested, remedy = ", ".join(releases.TESTED), _install_command()
    if release in releases.TESTED:
        return ok("SGLang", f"{release}, a tested release")
    if releases.too_old(release) is not None:
        return fix("SGLang", f"{release} is too old for the plugin; tested: {tested}", remedy)
    return note("SGLang", f"{release} is not among the tested releases {tested}", remedy)


def check_internals() -> list[Finding]:
    """Check whether SGLang has everything that the plugin hooks, calls, reads or writes in it.

    An engine checks the features that it uses when it starts; this checks all features.
    """
    internals = _plugin("internals")
    source = internals.installed()
    if source is None:
        return [note("internals", "not checked: SGLang is not installed")]
    release, remedy = _plugin("releases").installed(), _install_command()
    findings: list[Finding] = []
    count = 0
    for feature in (internals.EVERYBODY, *internals.FEATURES):
        check = internals.looked_at(release, source, feature, _plugin("plugin").hooked(feature))
        count += len(check.seen)
        text = f"this SGLang {check.problem}"
        if check.problem and (feature == internals.EVERYBODY or _is_on_by_default(feature)):
            findings.append(fix("internals", text, remedy))
        elif check.problem:
            findings.append(note("internals", f"{text}; {feature} needs that", remedy))
    return findings or [ok("internals", f"SGLang has all {count} internals that the plugin uses")]


def _is_on_by_default(feature: str) -> bool:
    """Return whether engines on this machine use a feature without an argument for it."""
    return feature == _plugin("internals").CPU and not accelerators()


def _install_command() -> str:
    return f"pip install sglang=={_plugin('releases').TESTED[-1]}"


def _plugin(name: str) -> Any:
    """Import a module of the plugin, which is not a dependency and has no types here."""
    return import_module(f"flashmoa_sglang.{name}")


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
    release, runtime = build
    torch = ok("torch", f"{release}, {runtime or 'without CUDA'}")
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
    release = re.search(r"__version__ = '([^']+)'", text)
    found = re.search(r"^(cuda|hip)\b[^=]*= '([^']+)'", text, re.MULTILINE)
    runtime = f"{'CUDA' if found[1] == 'cuda' else 'ROCm'} {found[2]}" if found else None
    return release[1] if release else "?", runtime


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
    try:
        return path.read_text()
    except OSError:
        return ""
