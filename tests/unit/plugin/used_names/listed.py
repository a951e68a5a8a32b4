"""The list as text: a line for each use, by the engines and the releases that it is for."""

from __future__ import annotations

from collections import defaultdict

from flashmoa_sglang.internals import EVERYBODY, FEATURES
from flashmoa_sglang.internals.used_names import Use, served
from flashmoa_sglang.releases import TESTED

from tests.unit.plugin.used_names import features
from tests.unit.plugin.used_names.derive import uses

_HEAD = """\
# What the plugin uses inside SGLang. Derived from the plugin's source: `make names` rewrites it.
#
# [engines] releases       the engines that come to what follows; with which releases, if not all
# module                   a module that is imported
# module name              what it defines
# module:Class name        what the class or its objects have; 'name': a string in its source
# one|other name           any of these; package/*: any class there; module:*: whatever it is set on
# ... name(_, key=_)       called with these arguments; with *_: perhaps with more
# ... def name(key=None)   a method of the plugin in its place, which takes these
"""


def text() -> str:
    """Derive the list, for all tested releases."""
    sections: dict[str, list[str]] = defaultdict(list)
    for feature in (EVERYBODY, *FEATURES):
        releases: dict[str, list[str]] = defaultdict(list)
        for release in TESTED:
            for one in _lines(release, feature):
                releases[one].append(served(release))
        only = {one: its if len(its) < len(TESTED) else [] for one, its in releases.items()}
        for one in sorted(only, key=lambda one: (only[one], one)):
            sections[" ".join([f"[{feature}]", *only[one]])].append(one)
    shown = ("\n".join([section, *lines, ""]) for section, lines in sections.items())
    return "\n".join([_HEAD, *shown])


def _lines(release: str, feature: str) -> set[str]:
    found = {use for where, use in uses(release) if features.feature(where) == feature}
    mentioned = {use for use in found if use == Use(use.owner, use.name)}
    # Where it is called as well, the call says all.
    called = {Use(use.owner, use.name) for use in found - mentioned}
    return {_line(use) for use in found - (mentioned & called)}


def _line(use: Use) -> str:
    """Return the line that ``flashmoa_sglang.internals.used_names.parsed`` reads."""
    if use.override is not None:
        return f"{use.owner} def {use.name}({use.override})"
    shown = f"{use.owner} {use.name}".rstrip()
    if use.positional is None and not use.keywords:
        return shown
    passed = ["*_"] if use.positional is None else ["_"] * use.positional
    return f"{shown}({', '.join([*passed, *(f'{one}=_' for one in use.keywords)])})"
