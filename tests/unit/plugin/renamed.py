"""The installed SGLang with one name changed."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from flashmoa_sglang.sglang.internals import Definitions, Source


@cache
def installed() -> Source:
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    return Source(Path(package.submodule_search_locations[0]))


class Renamed(Source):
    """The installed release with a name replaced. Modules without the name are read once."""

    def __init__(self, name: str) -> None:
        super().__init__(installed().root)
        self._name = name

    def read(self, file: Path) -> str:
        return re.sub(rf"\b{self._name}\b", f"{self._name}_of_another_release", super().read(file))

    def module(self, name: str) -> Definitions | None:
        usual = installed().module(name)
        return usual if usual is None or self._name not in usual.text else super().module(name)
