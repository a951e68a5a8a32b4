"""The plugin's own files, as far as an engine with one SGLang release comes to them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from flashmoa_sglang.internals import names
from flashmoa_sglang.internals.use import Use
from flashmoa_sglang.internals.walk import Walk
from flashmoa_sglang.releases import Release, class_for

_PLUGIN = Path(__file__).parent.parent
# What comes from SGLang has no type in the plugin, unless it is imported.
_MAY_USE = re.compile(r"\bAny\b|\bsglang\.")
_BASE = "releases/base.py"


@cache
def uses(release: str) -> tuple[Use, ...]:
    """What the plugin uses of a release, engines of all kinds together.

    Raises: OSError where the plugin's source is not there.
    """
    walked = walks(release)
    functions = {where for walk in walked for where in walk.functions}
    found = [use for walk in walked for use in walk.uses]
    found += [
        Use(owner, name, where) for where, owner, name in names.BY_STRING if where in functions
    ]
    of_release = names.NOT_NEEDED.get(_module(release), ())
    not_needed = (*names.NOT_NEEDED[""], *of_release)
    return tuple(
        use
        for use in found
        if not any(_is_in(use, where) and name in (use.name, "") for where, name in not_needed)
    )


def _is_in(use: Use, where: str) -> bool:
    """Whether it is used there, or in a method of the class that is there."""
    return use.where == where or use.where.startswith(f"{where}.")


def walks(release: str) -> list[Walk]:
    """Raises: OSError where the plugin's source is not there."""
    module = _module(release)
    found: list[Walk] = []
    for path in sorted(_PLUGIN.rglob("*.py")):
        file = path.relative_to(_PLUGIN).as_posix()
        of_release = re.fullmatch(r"releases/(v\w+)\.py", file)
        if file.startswith(names.APART) or (of_release and of_release[1] != module):
            continue
        text = path.read_text(encoding="utf-8")
        if not _MAY_USE.search(text):
            continue
        skipped = _overridden(path.with_name(f"{module}.py"), release) if file == _BASE else ()
        found.append(Walk(file, ast.parse(text), skipped))
    return found


def _overridden(path: Path, release: str) -> set[str]:
    """The methods of the base class that a release overrides and does not call, either."""
    called = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
    }
    own = vars(class_for(release)).keys() & vars(Release).keys()
    return {f"{Release.__name__}.{name}" for name in own - called}


def _module(release: str) -> str:
    """The name of the module that serves a release."""
    return class_for(release).__module__.rpartition(".")[2]
