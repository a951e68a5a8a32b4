"""The installed SGLang, in which a name is another one."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from flashmoa_sglang.internals.sglang_modules import Module
from flashmoa_sglang.internals.sglang_source import Source


def sglang() -> Path:
    """The folder of the package."""
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    return Path(package.submodule_search_locations[0])


@cache
def installed() -> Source:
    return Source(sglang())


def renamed(text: str, name: str) -> str:
    return re.sub(rf"\b{name}\b", f"{name}_of_another_release", text)


class Renamed(Source):
    """With a name replaced wherever it stands. What does not have it is read once for all."""

    def __init__(self, name: str) -> None:
        super().__init__(sglang())
        self._name = name

    def read(self, name: str) -> Module | None:
        usual = installed().module(name)
        if usual is None or self._name not in usual.text:
            return usual
        return super().read(name)

    def text(self, file: Path) -> str:
        return renamed(super().text(file), self._name)


def copy_renamed(target: Path, name: str) -> Path:
    """A package to be imported in its place, with a name replaced wherever it stands.

    Returns: what is to be on the path. Files without the name, and folders of such, are links.
    """
    root = sglang()
    changed = {
        file: new
        for file in root.rglob("*.py")
        if (new := renamed(old := file.read_text(encoding="utf-8"), name)) != old
    }
    real = {folder for file in changed for folder in file.parents if folder.is_relative_to(root)}
    for folder in sorted(real):
        into = target / "sglang" / folder.relative_to(root)
        into.mkdir(parents=True)
        for one in folder.iterdir():
            if one in changed:
                (into / one.name).write_text(changed[one], encoding="utf-8")
            elif one not in real and one.name != "__pycache__":
                (into / one.name).symlink_to(one)
    return target
