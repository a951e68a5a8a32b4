"""Check the Python packages (``check_installation``): FlashMoA, its plugin, SGLang, AutoGen.

SGLang and torch are not imported, which would take half a minute. The internals of SGLang that the
plugin uses are looked up in SGLang's source.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import flashmoa
from flashmoa.doctor.findings import Finding, fix, note, ok
from flashmoa.doctor.machine import accelerators, check_machine, check_system, runs_engines

_PLUGIN = "flashmoa"
_INSTALL_PLUGIN = "pip install ./server_patches"
_AUTOGEN = ("autogen-core", "autogen-agentchat", "autogen-ext")


def check_installation() -> list[Finding]:
    """Check everything on this machine that a client or an engine needs."""
    findings = [*check_system(), ok("flashmoa", flashmoa.__version__), check_autogen()]
    if not runs_engines():
        return findings
    if installed("sglang") is not None:
        findings += check_machine()
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
    findings = [check_release(sglang), _check_version(plugin), *_check_entry_points()]
    return [*findings, *check_internals()]


def _check_version(plugin: str) -> Finding:
    if plugin == flashmoa.__version__:
        return ok("plugin", f"flashmoa-sglang {plugin}")
    text = f"flashmoa-sglang is {plugin}, but flashmoa is {flashmoa.__version__}"
    return fix("plugin", text, f"{_INSTALL_PLUGIN} . (both from one checkout)")


def _check_entry_points() -> list[Finding]:
    needed = {"sglang.srt.plugins": _PLUGIN, "sglang.srt.platforms": "flashmoa_cpu"}
    missing = [
        f"{group}: {name}"
        for group, name in needed.items()
        if name not in {entry.name for entry in entry_points(group=group)}
    ]
    if not missing:
        return []
    text = f"SGLang will not find the plugin: there is no entry point {' or '.join(missing)}"
    return [fix("plugin", text, f"{_INSTALL_PLUGIN} --force-reinstall --no-deps")]


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
