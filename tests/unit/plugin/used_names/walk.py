"""What a file of the plugin uses of SGLang, found in its source.

What a variable stands for is said once for all files, in ``names.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import TypeGuard

from flashmoa_sglang.internals.check import signature
from flashmoa_sglang.internals.sglang_modules import FUNCTIONS, Function
from flashmoa_sglang.internals.used_names import Use

from tests.unit.plugin.used_names import names

_ATTRIBUTE_FUNCTIONS = ("getattr", "setattr", "hasattr")
# What the plugin itself puts on SGLang's objects, and what every object has.
_NOT_THEIRS = ("flashmoa", "__")
# How a value begins that is text, and one that ``names.py`` does not tell.
_TEXT, _UNCLEAR = "'", "?"
# Attributes that say of what has them that it is no object of SGLang's.
_OF_PLAIN = {name for kind in (str, list, dict, set, int, bytes) for name in dir(kind)}


class Walk(ast.NodeVisitor):
    """The uses of one file.

    Args:
        file: its path in the plugin, as ``names.py`` has it.
        stand_for: what names in it stand for.
        reached: the functions and methods to walk; ``None``: all.

    Attributes:
        uses: what was found, after the function it was found in.
        unclear: what could not be followed, for a test to refuse.
        functions: what was walked.
    """

    def __init__(
        self,
        file: str,
        tree: ast.Module,
        stand_for: Mapping[str, str] = names.NAMES,
        reached: Collection[ast.stmt] | None = None,
    ) -> None:
        self.uses: list[tuple[str, Use]] = []
        self.unclear: list[str] = []
        self.functions: set[str] = set()
        self._where, self._names, self._reached = file, stand_for, reached
        # What has been learnt of variables; ``None``: nothing of SGLang.
        self._known: dict[str, str | None] = {}
        # Of the class that is walked: its base, and its own attributes.
        self._base: str | None = None
        self._own: set[str] = set()
        # Strings at the top of the file, one or several (the keys of a dictionary, too), by name.
        self._constants = {
            ast.unparse(target): _strings(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        self.visit(tree)

    def visit_FunctionDef(self, node: Function) -> None:
        if self._reached is not None and node not in self._reached:
            return
        outside, known = self._enter(node), self._known
        self._known = dict(known)
        for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            if one.arg not in ("self", "cls"):
                self._learn_parameter(one)
        # The dictionary that a function returns may have keys that name what SGLang has.
        if owner := self._names.get(f"{node.name}{{}}"):
            for one in ast.walk(node):
                if isinstance(one, ast.Return) and one.value is not None:
                    for key in _strings(one.value):
                        self._use(Use(owner, key))
        self.generic_visit(node)
        self._where, self._known = outside, known

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside, base, own = self._enter(node), self._base, self._own
        self._base = "|".join(found for one in node.bases if (found := self._value(one))) or None
        stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
        self._own = {one.attr for one in stored if isinstance(one.ctx, ast.Store)}
        self._own |= {one.name for one in node.body if isinstance(one, FUNCTIONS)}
        for one in node.body if self._base is not None else ():
            # SGLang would not ask for these any more under another name.
            if isinstance(one, FUNCTIONS) and not one.name.startswith("_"):
                takes = str(signature(deepcopy(one), bound=True))
                self._use(Use(self._base or "", one.name, override=takes[1:-1]))
            elif isinstance(one, ast.Assign):
                for target in one.targets:
                    self._use(Use(self._base or "", ast.unparse(target)))
        self.generic_visit(node)
        self._where, self._base, self._own = outside, base, own

    def _enter(self, node: Function | ast.ClassDef) -> str:
        """Begin a function or class; return what it is in."""
        outside = self._where
        self._where = f"{outside}{'.' if ':' in outside else ':'}{node.name}"
        self.functions.add(self._where)
        return outside

    def _learn_parameter(self, one: ast.arg) -> None:
        shown = ast.unparse(one.annotation) if one.annotation is not None else "Any"
        kind = shown.removesuffix(" | None")
        if known := self._known.get(kind, self._names.get(kind)):
            self._known[one.arg] = known
        elif "Any" not in kind or kind.startswith(("Callable", "dict")):
            self._known[one.arg] = None
        elif one.arg not in self._names:
            self._known[one.arg] = f"{_UNCLEAR}the parameter {one.arg}"

    def visit_If(self, node: ast.If) -> None:
        if _dotted(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        # These are not imported, but say what something is.
        for one in (one for one in node.body if isinstance(one, ast.ImportFrom)):
            self._learn_import(one)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if self._learn_import(node):
            for alias in node.names:
                self._use(Use(node.module or "", alias.name))

    def _learn_import(self, node: ast.ImportFrom) -> bool:
        is_theirs = (node.module or "").split(".")[0] == "sglang"
        for alias in node.names:
            if is_theirs and (name := alias.asname or alias.name) not in self._names:
                self._known[name] = f"{node.module}:{alias.name}"
        return is_theirs

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "sglang":
                self._use(Use(alias.name, ""))

    def visit_Assign(self, node: ast.Assign | ast.NamedExpr) -> None:
        self.generic_visit(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._learn(target, node.value)

    visit_NamedExpr = visit_Assign

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its_value in zip(target.elts, value.elts, strict=False):
                self._learn(one, its_value)
        elif isinstance(target, ast.Name) and (found := self._value(value)) is not None:
            self._known[target.id] = found

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        self._learn_element(node.target, node.iter)
        self.generic_visit(node)

    visit_AsyncFor = visit_For

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        # What is computed stands before what it is computed from.
        for one in node.generators:
            self.visit_For(one)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _learn_element(self, target: ast.expr, of: ast.expr) -> None:
        first = target.elts[0] if isinstance(target, ast.Tuple) else target
        if isinstance(of, ast.Call) and _dotted(of.func) == "enumerate":
            if isinstance(target, ast.Tuple):
                self._learn_element(target.elts[1], of.args[0])
        elif isinstance(first, ast.Name):
            found = self._value(of)
            # A dictionary's ``items()`` are by its keys.
            called = of.func if isinstance(of, ast.Call) else of
            through = called.value if isinstance(called, ast.Attribute) else called
            if texts := self._constants.get(_dotted(through)) or _strings(through):
                self._known[first.id] = _TEXT + " ".join(sorted(texts))
            elif found is not None and found.startswith("["):
                self._known[first.id] = found[1:-1]

    def _value(self, node: ast.expr | None) -> str | None:
        """Return what an expression stands for, as in ``names.py``; ``None``: nothing of SGLang."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return f"{_TEXT}{node.value}"
        if isinstance(node, ast.Name):
            if node.id in self._known:
                return self._known[node.id]
            texts = self._constants.get(node.id)
            return f"{_TEXT}{texts[0]}" if texts else self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            named = self._names.get(_dotted(node))
            return named if named is not None else self._member(self._owner(node), node.attr)
        if isinstance(node, ast.Call):
            return self._value_of_call(node)
        if isinstance(node, ast.Subscript):
            found = self._value(node.value)
            return found[1:-1] if found is not None and found.startswith("[") else None
        if isinstance(node, ast.BoolOp):
            return next((found for one in node.values if (found := self._value(one))), None)
        if isinstance(node, ast.IfExp):
            return self._value(node.body) or self._value(node.orelse)
        return self._value(node.value) if isinstance(node, ast.Await | ast.NamedExpr) else None

    def _value_of_call(self, node: ast.Call) -> str | None:
        called = _dotted(node.func)
        if called == "super":
            return self._base
        for name in (called, called.rpartition(".")[2]):
            if f"{name}()" in self._names:
                return self._names[f"{name}()"]
        if isinstance(node.func, ast.Attribute):
            return self._member(self._owner(node.func), f"{node.func.attr}()")
        return self._value(node.func)

    def _owner(self, node: ast.Attribute) -> str | None:
        """Return what has the attribute; of ``self`` only what a base class of SGLang's has."""
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self._base if node.attr not in self._own else None
        return self._value(node.value)

    def _member(self, owner: str | None, name: str) -> str | None:
        if not _is_theirs(owner) or name.startswith(_NOT_THEIRS):
            return None
        found = names.member(owner, name)
        return found if found is not None else f"{_UNCLEAR}{owner}.{name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if (owner := self._owner(node)) is not None:
            self._use(Use(owner, node.attr))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = _dotted(node.func)
        if called in _ATTRIBUTE_FUNCTIONS:
            self._use_named_by_text(node)
            return
        keywords = tuple(one.arg for one in node.keywords if one.arg is not None)
        starred = any(isinstance(one, ast.Starred) for one in node.args)
        told = not starred and len(keywords) == len(node.keywords)
        arguments = len(node.args) if told else None, keywords
        if isinstance(node.func, ast.Attribute):
            if _is_theirs(owner := self._owner(node.func)):
                self._use(Use(owner, node.func.attr, *arguments))
        elif _is_theirs(callee := self._known.get(called)):
            module, _, name = callee.partition(":")
            self._use(Use(module, name, *arguments))

    def _use_named_by_text(self, node: ast.Call) -> None:
        """Note what ``getattr(req, "rid", None)`` asks for: its absence would go unnoticed."""
        owner, name = self._value(node.args[0]), self._value(node.args[1])
        if not _is_theirs(owner):
            return
        if name is None or name.startswith(_UNCLEAR):
            self.unclear.append(f"{self._where}: which attributes are {ast.unparse(node)}?")
            return
        for one in name.removeprefix(_TEXT).split():
            self._use(Use(owner, one))

    def _use(self, use: Use) -> None:
        if use.name.startswith(_NOT_THEIRS):
            return
        if use.owner.startswith(_UNCLEAR) and use.name not in _OF_PLAIN:
            self.unclear.append(f"{self._where}: what is {use.owner[1:]}, that has {use.name}?")
        elif _is_theirs(use.owner):
            self.uses.append((self._where, use))


def _is_theirs(value: str | None) -> TypeGuard[str]:
    return value is not None and value.startswith("sglang")


def _strings(node: ast.expr) -> list[str]:
    """Return a string, or those in the literal of a collection; of a dictionary the keys."""
    if isinstance(node, ast.Dict):
        elements: Iterable[ast.expr | None] = node.keys
    else:
        elements = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    values = [one.value for one in elements if isinstance(one, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as it is written; empty where it is more than names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
