"""Names that a file of the plugin has as strings and keywords, and where they are passed to."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Texts:
    """Of one file.

    Attributes:
        constant: strings at the top of the file, by name.
        passed: what its functions are called with in the file, by function and parameter.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.constant: dict[str, str] = {}
        self.passed: dict[tuple[str, str], set[str]] = {}
        # Several at the top of the file; the keys of a dictionary, too.
        self._several: dict[str, list[str]] = {}
        # The parameters of functions that take others by keyword, and what they call those.
        self._takers: dict[str, tuple[str, set[str]]] = {}
        functions: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                own = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
                functions[node.name] = own
                if node.args.kwarg:
                    self._takers[node.name] = node.args.kwarg.arg, set(own)
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self._read_constant(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self._read_call(node, functions.get(node.func.id, []), node.func.id)

    def _read_constant(self, node: ast.Assign | ast.AnnAssign) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and node.value is not None:
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                self.constant[target.id] = node.value.value
            else:
                self._several[target.id] = constants(node.value)

    def _read_call(self, node: ast.Call, parameters: list[str], name: str) -> None:
        for parameter, one in zip(parameters, node.args, strict=False):
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                self.passed.setdefault((name, parameter), set()).add(one.value)

    def of(self, node: ast.expr) -> list[str]:
        """The strings that an expression runs through."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value  # A dictionary's ``items()``.
        return self._several.get(node.id, []) if isinstance(node, ast.Name) else constants(node)

    def keywords(
        self, function: str, given: Iterable[str], meant: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """What is passed on by a function's ``**name``, and what it belongs to, by ``name{}``."""
        taker, own = self._takers.get(function, ("", set()))
        if owner := meant.get(f"{taker}{{}}"):
            for one in given:
                if one not in own:
                    yield owner, one


def constants(node: ast.expr) -> list[str]:
    """The strings in the literal of a collection."""
    if isinstance(node, ast.Dict):
        elements = [one for one in node.keys if one is not None]
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        elements = node.elts
    else:
        return []
    return [
        one.value
        for one in elements
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written; empty where it is more than names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
