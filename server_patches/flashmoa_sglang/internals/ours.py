"""The plugin's own files, as far as an engine with one SGLang release comes to them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from flashmoa_sglang import releases
from flashmoa_sglang.internals import names
from flashmoa_sglang.internals.use import Use
from flashmoa_sglang.internals.walk import Walk

_PLUGIN = Path(__file__).parent.parent
# What comes from SGLang has no type in the plugin, unless it is imported.
_MAY_USE = re.compile(r"\bAny\b|\bsglang\.")
# Has what the modules of other releases do not have.
_ALL_THERE = "v0_5_18"


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
    of_release = names.NOT_NEEDED.get(releases.module_for(release), ())
    not_needed = {*names.NOT_NEEDED[""], *of_release}
    return tuple(
        use
        for use in found
        if (use.where, use.name) not in not_needed and (use.where, "") not in not_needed
    )


def walks(release: str) -> list[Walk]:
    """Raises: OSError where the plugin's source is not there."""
    module = releases.module_for(release)
    found: list[Walk] = []
    for path in sorted(_PLUGIN.rglob("*.py")):
        file = path.relative_to(_PLUGIN).as_posix()
        of_release = re.fullmatch(r"releases/(v\w+)\.py", file)
        if file.startswith(names.APART) or (
            of_release and of_release[1] not in (module, _ALL_THERE)
        ):
            continue
        text = path.read_text(encoding="utf-8")
        if not _MAY_USE.search(text):
            continue
        tree = ast.parse(text)
        skipped = _replaced(tree, path.parent, module) if of_release else set[str]()
        found.append(Walk(file, tree, skipped))
    return found


def _replaced(tree: ast.Module, folder: Path, module: str) -> set[str]:
    """The names in a release's module that an engine with another release does not come to."""
    defined, instead = _defined(tree), _defined(_parsed(folder / f"{module}.py"))
    if defined.keys() == instead.keys():
        return set()
    todo = _asked(_parsed(folder / "__init__.py")) - instead.keys()
    reached: set[str] = set()
    while todo := todo & defined.keys() - reached:
        reached |= todo
        nodes = [node for name in todo for node in ast.walk(defined[name])]
        todo = {node.id for node in nodes if isinstance(node, ast.Name)}
    return defined.keys() - reached


def _asked(tree: ast.Module) -> set[str]:
    """What is taken from the installed release's module."""
    return {
        str(one.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_chosen"
        for one in node.args
        if isinstance(one, ast.Constant)
    }


def _defined(tree: ast.Module) -> Mapping[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = node
    return found


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
