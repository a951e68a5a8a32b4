"""What the plugin uses inside SGLang, as ``used_names.txt`` lists it; what a line says is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashmoa_sglang.releases import class_for

LIST = Path(__file__).with_name("used_names.txt")


@dataclass(frozen=True, slots=True)
class Use:
    """One thing of SGLang that the plugin uses.

    ``owner``: a module, a class as ``module:Class``, or several of which any may have it, divided
    by ``|``. ``name``: in it; empty for the module itself. ``positional``, ``keywords``: the
    arguments of a call; ``positional`` is ``None`` where there may be more than these, and where
    nothing is called. ``override``: what a method of ours in its place takes, without ``self``.
    """

    owner: str
    name: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    override: str | None = None


def used(release: str, feature: str) -> Iterator[Use]:
    """Yield what engines with a feature use of a release, or what all of them do."""
    served_by = served(release)
    wanted = False
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if section := re.fullmatch(r"\[(.+)\] ?(.*)", line):
            only = section[2].split()
            wanted = section[1] == feature and (not only or served_by in only)
        elif wanted and line:
            yield parsed(line)


def served(release: str) -> str:
    """Return the name of the module whose class serves a release."""
    return class_for(release).__module__.rpartition(".")[2]


def parsed(line: str) -> Use:
    """Read a line of the list."""
    owner, _, what = line.partition(" ")
    name, bracket, inside = what.removeprefix("def ").partition("(")
    inside = inside.removesuffix(")")
    if what.startswith("def "):
        return Use(owner, name, override=inside)
    passed = inside.split(", ")
    keywords = tuple(one.removesuffix("=_") for one in passed if one.endswith("=_"))
    positional = None if not bracket or "*_" in passed else passed.count("_")
    return Use(owner, name, positional, keywords)
