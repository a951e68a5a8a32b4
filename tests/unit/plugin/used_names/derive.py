"""What the plugin uses of SGLang, as far as an engine with one release comes to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import flashmoa_sglang
from flashmoa_sglang.internals.used_names import Use, served
from flashmoa_sglang.releases import class_for

from tests.unit.plugin.used_names import names
from tests.unit.plugin.used_names.walk import Walk

_PLUGIN = Path(flashmoa_sglang.__file__).parent
# The files with all that releases have in ways of their own.
_BASES = ("releases/base.py", "releases/requests.py")


def uses(release: str) -> list[tuple[str, Use]]:
    """Return what the plugin uses of a release, engines of all kinds together, and where."""
    walked = walks(release)
    functions = {where for walk in walked for where in walk.functions}
    found = [one for walk in walked for one in walk.uses]
    found += [(where, use) for where, use in names.BY_STRING if where in functions]
    not_needed = {*names.NOT_NEEDED[""], *names.NOT_NEEDED.get(served(release), ())}
    return [
        (where, replace(use, owner=owner))
        for where, use in found
        if not {(where, use.name), (where, "")} & not_needed
        for owner in names.OF_SOME.get((use.owner, use.name), use.owner).split("&")
    ]


@cache
def walks(release: str) -> list[Walk]:
    """Walk the files that an engine with this release comes to."""
    trees: dict[str, ast.Module] = {}
    for path in sorted(_PLUGIN.rglob("*.py")):
        file = path.relative_to(_PLUGIN).as_posix()
        if not file.startswith(names.APART):
            trees[file] = ast.parse(path.read_text(encoding="utf-8"))
    of_releases = [f"releases/{served(release)}.py", *_BASES]
    others = {file for file in trees if re.match(r"releases/v", file)} - set(of_releases)
    reached = _reached(trees, of_releases, others)
    return [
        Walk(
            file,
            tree,
            names.stand_for(file, class_for(release)),
            reached if file in of_releases else None,
        )
        for file, tree in trees.items()
        if file not in others
    ]


def _reached(
    trees: dict[str, ast.Module], of_releases: list[str], others: set[str]
) -> set[ast.stmt]:
    """Return what is used of releases' modules; the first module that has a name counts."""
    defined: dict[str, list[ast.stmt]] = {}
    for file in of_releases:
        for name, node in _definitions(trees[file]):
            defined.setdefault(name, []).append(node)
    todo: set[str] = set()
    for file in trees.keys() - others - set(of_releases):
        todo |= _identifiers(trees[file])
    seen: set[str] = set()
    reached: set[ast.stmt] = set()
    while todo := todo & defined.keys() - seen:
        seen |= todo
        for node in [one for name in todo for one in _called(defined[name])]:
            reached |= {one for one in ast.walk(node) if isinstance(one, ast.stmt)}
            todo = todo | _identifiers(node)
    return reached


def _called(definitions: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the first one, and those after it that are called as ``super()``."""
    for node in definitions:
        yield node
        if "super" not in _identifiers(node):
            return


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield functions, variables and methods with their names."""
    for node in tree.body:
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                yield one.name, one
            elif isinstance(one, ast.Assign | ast.AnnAssign):
                target = one.targets[0] if isinstance(one, ast.Assign) else one.target
                yield ast.unparse(target), one


def _identifiers(tree: ast.AST) -> set[str]:
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }
