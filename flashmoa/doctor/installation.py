"""What is looked at of the Python packages: FlashMoA, its plugin, SGLang, AutoGen.

Nothing of SGLang or torch is imported, so that it takes a moment and not half a minute.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, entry_points, version

import flashmoa
from flashmoa.doctor.findings import Finding, mend, note, ok
from flashmoa.doctor.machine import check_machine, check_system, runs_engines

_PLUGIN = "flashmoa"
_INSTALL_PLUGIN = "pip install ./server_patches"
_AUTOGEN = ("autogen-core", "autogen-agentchat", "autogen-ext")


def check_installation() -> list[Finding]:
    """Everything of this machine that a client or an engine needs."""
    found = [*check_system(), ok("flashmoa", flashmoa.__version__), check_autogen()]
    if not runs_engines():
        return found
    if installed("sglang") is not None:
        found += check_machine()
    return [*found, *check_plugin(), *check_environment()]


def installed(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_autogen() -> Finding:
    """The extra that ``flashmoa.autogen`` needs."""
    missing = [name for name in (*_AUTOGEN, "openai") if installed(name) is None]
    if not missing:
        return ok("AutoGen", installed(_AUTOGEN[0]) or "")
    text = f"{', '.join(missing)} not installed; only flashmoa.autogen needs that"
    return note("AutoGen", text, "pip install 'flashmoa[autogen]'")


def check_plugin() -> list[Finding]:
    """SGLang, the plugin beside it, and whether one fits the other."""
    sglang, plugin = installed("sglang"), installed("flashmoa-sglang")
    if sglang is None and plugin is None:
        text = "neither it nor the plugin is here: engines have to run elsewhere"
        return [note("SGLang", text, "give --engine URL to look at one")]
    if sglang is None:
        remedy = "make setup (CPU), or pip install sglang==0.5.18 (GPU)"
        return [mend("SGLang", "the plugin is installed, SGLang is not", remedy)]
    if plugin is None:
        text = "SGLang is installed, flashmoa-sglang is not: an engine would not link"
        return [ok("SGLang", sglang), mend("plugin", text, _INSTALL_PLUGIN)]
    from flashmoa.doctor import hooks  # It needs the plugin.

    found = [hooks.check_release(sglang), _same_version(plugin), *_entry_points()]
    return [*found, *hooks.check_internals()]


def _same_version(plugin: str) -> Finding:
    if plugin == flashmoa.__version__:
        return ok("plugin", f"flashmoa-sglang {plugin}")
    text = f"flashmoa-sglang is {plugin}, flashmoa {flashmoa.__version__}"
    return mend("plugin", text, f"{_INSTALL_PLUGIN} . (both from one checkout)")


def _entry_points() -> list[Finding]:
    wanted = {"sglang.srt.plugins": _PLUGIN, "sglang.srt.platforms": "flashmoa_cpu"}
    missing = [
        f"{group}: {name}"
        for group, name in wanted.items()
        if name not in {entry.name for entry in entry_points(group=group)}
    ]
    if not missing:
        return []
    text = f"SGLang will not see it; no entry point {' or '.join(missing)}"
    return [mend("plugin", text, f"{_INSTALL_PLUGIN} --force-reinstall --no-deps")]


def check_environment() -> list[Finding]:
    """Environment variables of SGLang's that keep the plugin out."""
    found: list[Finding] = []
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if excludes_plugin(allowed):
        text = f"SGLANG_PLUGINS={allowed} keeps the plugin out"
        found.append(mend("environment", text, "unset SGLANG_PLUGINS, or add flashmoa to it"))
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if platform not in ("", "flashmoa_cpu"):
        text = f"SGLANG_PLATFORM={platform} leaves out plugins that bring another platform"
        found.append(mend("environment", text, "unset SGLANG_PLATFORM"))
    return found


def excludes_plugin(allowed: str) -> bool:
    """Whether ``SGLANG_PLUGINS``, names that are to be loaded, leaves the plugin out."""
    names = {name.strip() for name in allowed.split(",")} - {""}
    return bool(names) and _PLUGIN not in names
