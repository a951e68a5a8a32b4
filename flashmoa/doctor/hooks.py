"""Whether the installed SGLang is one the plugin can work in; needs the plugin.

What the plugin looks at when an engine starts, for engines of all kinds. SGLang's source is read
for it and nothing imported, which would take most of a start.
"""

from __future__ import annotations

from typing import Any

from flashmoa.doctor import machine
from flashmoa.doctor.findings import Finding, mend, note, ok


def check_release(release: str) -> Finding:
    """SGLang's release, against those that the plugin was tested with."""
    releases = _plugin("releases")
    tested = ", ".join(releases.TESTED)
    if release in releases.TESTED:
        return ok("SGLang", f"{release}, a tested release")
    if releases.too_old(release) is not None:
        return mend("SGLang", f"{release} is too old for the plugin; tested: {tested}", _remedy())
    return note("SGLang", f"{release} is not among the tested releases {tested}", _remedy())


def check_internals() -> list[Finding]:
    """Whether everything is there that the plugin hooks, calls, reads or writes inside SGLang."""
    internals, names = _plugin("internals"), _plugin("internals.names")
    source = internals.installed()
    if source is None:
        return [note("internals", "not looked at: SGLang is not installed")]
    release, remedy = _plugin("releases").installed(), _remedy()
    found: list[Finding] = []
    count = 0
    for feature in (names.EVERYBODY, *names.FEATURES):
        check = internals.looked_at(release, source, feature, _plugin("plugin").hooked(feature))
        count += len(check.seen)
        text = f"this SGLang {check.problem}"
        if check.problem and (feature == names.EVERYBODY or _starts_with(feature)):
            found.append(mend("internals", text, remedy))
        elif check.problem:
            found.append(note("internals", f"{text}; {feature} needs that", remedy))
    return found or [
        ok("internals", f"all {count} things that the plugin uses of SGLang are there")
    ]


def _starts_with(feature: str) -> bool:
    """Whether an engine has a feature here without being asked for it."""
    return feature == _plugin("internals.names").CPU and not machine.accelerators()


def _remedy() -> str:
    return f"pip install sglang=={_plugin('releases').TESTED[-1]}"


def _plugin(name: str) -> Any:
    """A module of the plugin, which is no dependency and has no types here."""
    from importlib import import_module

    return import_module(f"flashmoa_sglang.{name}")
