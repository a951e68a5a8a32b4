"""Modules and classes of SGLang as text, of which as little is parsed as answers a question.

What the plugin uses lies in some of the longest files there are. A glimpse looks for the lines that
may define a name, and parses what they belong to. Where it sees nothing the whole file is parsed:
that a name is not there is never said because of a glimpse.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect
from collections.abc import Iterator
from functools import cached_property
from textwrap import dedent

# Statements around others that are executed, or may be, where they stand.
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)
_IMPORT = re.compile(r"^ *from\s+[\w.]+\s+import\s+(?:\([^)]*\)|[^(\n]+)$", re.MULTILINE)
# What such an import stands in, where it does not begin its line.
_LINE = re.compile(r"^[^\s#)]", re.MULTILINE)
_BLOCK = re.compile(r"(?:try|if|elif|else|except|with)\b")
_TOP = re.compile(r"^[A-Za-z_@]", re.MULTILINE)
_IN_CLASS = re.compile(r"^    [A-Za-z_@]", re.MULTILINE)
_METHOD = re.compile(r"^    (?:async )?def ", re.MULTILINE)
_DEFINITION = re.compile(r"^    (?:(?:async )?def )?(\w+)\s*[:=(]", re.MULTILINE)
# To one attribute, and to several at once.
_ASSIGNMENT = re.compile(
    r"\bself\.\w+\s*(?::[^=\n]+)?=[^=]|^\s*(?:\([^()=]*\)|[\w.]+,[\w., ]*)\s*=[^=]", re.MULTILINE
)

# Where a name comes from, if another module defines it.
Imported = tuple[str, str]


class Class:
    """One class: what it defines itself, and how its bases are written."""

    def __init__(self, module: Module, name: str, text: str) -> None:
        self.module = module
        self._name = name
        self._text = text
        # By where they begin.
        self._statements: dict[int, ast.stmt | None] = {}
        self._assigned: dict[int, set[str]] = {}

    @cached_property
    def bases(self) -> list[ast.expr]:
        head = re.match(r"class \w+(?:\([^()]*\))?:", self._text)
        node = _statement(f"{head[0]} pass") if head is not None else None
        return node.bases if isinstance(node, ast.ClassDef) else self.node.bases

    @cached_property
    def node(self) -> ast.ClassDef:
        node = _statement(self._text)
        # A line of a string in it may have looked like the end of it.
        return node if isinstance(node, ast.ClassDef) else self.module.class_node(self._name)

    def glimpse(self, name: str) -> ast.AST | None:
        """Where it defines a method or field, or assigns an attribute of ``self``."""
        start = self._definitions.get(name)
        if start is not None:
            node = self._statement_at(start)
            return node if node is not None and name in _defined(node) else None
        for start in self._assignments.get(name, ()):
            if start not in self._assigned:
                node = self._statement_at(start)
                self._assigned[start] = _assigned(node) if node is not None else set()
            if name in self._assigned[start]:
                return self._statement_at(start)
        return None

    @cached_property
    def _definitions(self) -> dict[str, int]:
        """Where lines begin that may define a method or field; the first of each."""
        found: dict[str, int] = {}
        for match in _DEFINITION.finditer(self._text):
            found.setdefault(match[1], match.start())
        return found

    @cached_property
    def _assignments(self) -> dict[str, list[int]]:
        """Where methods begin in which attributes of ``self`` may be assigned."""
        methods = [match.start() for match in _METHOD.finditer(self._text)]
        found: dict[str, list[int]] = {}
        for match in _ASSIGNMENT.finditer(self._text):
            if at := bisect(methods, match.start()):
                for name in re.findall(r"self\.(\w+)", match[0]):
                    found.setdefault(name, []).append(methods[at - 1])
        return found

    def _statement_at(self, start: int) -> ast.stmt | None:
        if start not in self._statements:
            self._statements[start] = _statement_at(self._text, start, _IN_CLASS)
        return self._statements[start]

    def find(self, name: str) -> ast.AST | None:
        """A method, a field, or whatever a method assigns to ``self``."""
        return self._names.get(name) if self.module.mentions(name) else None

    @cached_property
    def _names(self) -> dict[str, ast.AST]:
        found: dict[str, ast.AST] = dict.fromkeys(_assigned(self.node), self.node)
        for statement in _statements(self.node.body):
            for name in _defined(statement):
                found[name] = statement
                if name == "__slots__":
                    found |= dict.fromkeys(_strings(statement), statement)
        return found

    @cached_property
    def fields(self) -> dict[str, bool]:
        """What a dataclass, ``Struct`` or model of pydantic declares; whether it has a default."""
        return {
            statement.target.id: statement.value is not None
            for statement in self.node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }

    def has_string(self, value: str) -> bool:
        return re.search(rf"[\"']{re.escape(value)}[\"']", self._text) is not None


class Module:
    """One module.

    Args:
        name: as it is imported.
        text: its source.
    """

    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        self.name = name
        self.text = text
        self._package = name if is_package else name.rpartition(".")[0]
        self._found: dict[str, ast.AST | Class | Imported | None] = {}
        self._glimpsed: dict[str, ast.AST | Class | Imported | None] = {}

    def find(self, name: str) -> ast.AST | Class | Imported | None:
        """What a name stands for once the module is imported."""
        if name not in self._found:
            self._found[name] = self._names.get(name) if self.mentions(name) else None
        return self._found[name]

    def glimpse(self, name: str) -> ast.AST | Class | Imported | None:
        """The same, where it is seen at once."""
        if name not in self._glimpsed:
            self._glimpsed[name] = self._look(name)
        return self._glimpsed[name]

    def mentions(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self.text) is not None

    def classes(self) -> Iterator[Class]:
        """Those that it defines at its top."""
        for name in re.findall(r"^class (\w+)", self.text, re.MULTILINE):
            if isinstance(found := self.glimpse(name), Class):
                yield found

    def assigns(self, name: str) -> bool:
        """Whether it gives anything an attribute of this name."""
        return re.search(rf"\.{name}\s*=[^=]", self.text) is not None

    @property
    def stars(self) -> list[str]:
        """Modules all of whose names it imports."""
        return re.findall(r"^from ([\w.]+) import \*", self.text, re.MULTILINE)

    def class_node(self, name: str) -> ast.ClassDef:
        """Of a class at its top."""
        return next(
            node
            for node in _statements(self._tree.body)
            if isinstance(node, ast.ClassDef) and node.name == name
        )

    def _look(self, name: str) -> ast.AST | Class | Imported | None:
        defined = rf"^(?:(class|def|async def) {name}\b|{name}\s*[:=])"
        match = re.search(defined, self.text, re.MULTILINE)
        if match is None:
            return self._imported.get(name)
        if match[1] == "class":
            end = _TOP.search(self.text, match.end())
            return Class(self, name, self.text[match.start() : end.start() if end else None])
        return _statement_at(self.text, match.start(), _TOP)

    @cached_property
    def _imported(self) -> dict[str, Imported]:
        found: dict[str, Imported] = {}
        for match in _IMPORT.finditer(self.text):
            node = _statement(match[0])
            if isinstance(node, ast.ImportFrom) and not self._in_function(match):
                found |= self._from(node)
        return found

    def _in_function(self, match: re.Match[str]) -> bool:
        if match[0][0] != " ":
            return False
        at = bisect(self._lines, match.start())
        return not at or _BLOCK.match(self.text, self._lines[at - 1]) is None

    @cached_property
    def _lines(self) -> list[int]:
        """Where lines begin that are not indented."""
        return [line.start() for line in _LINE.finditer(self.text)]

    def _from(self, node: ast.ImportFrom) -> dict[str, Imported]:
        source = node.module or ""
        if node.level:
            parents = self._package.split(".")
            source = ".".join([*parents[: len(parents) - node.level + 1], source]).strip(".")
        return {alias.asname or alias.name: (source, alias.name) for alias in node.names}

    @cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError):  # For a newer Python than this one.
            return ast.Module([], [])

    @cached_property
    def _names(self) -> dict[str, ast.AST | Class | Imported]:
        found: dict[str, ast.AST | Class | Imported] = {}
        for statement in _statements(self._tree.body):
            if isinstance(statement, ast.ImportFrom):
                found |= self._from(statement)
            elif isinstance(statement, ast.ClassDef):
                found[statement.name] = Class(self, statement.name, "")
            else:
                # What a class is replaced by has its attributes, as a rule.
                found = dict.fromkeys(_defined(statement), statement) | found
        if lazy := found.get("__getattr__"):
            # Looked up when somebody asks for them, there or in a table of the module.
            tables = (one for one in self._tree.body if isinstance(one, ast.Assign | ast.AnnAssign))
            for node in (lazy, *tables):
                found = dict.fromkeys(_strings(node), self._tree) | found
        return found


def _statement(text: str) -> ast.stmt | None:
    try:
        (statement,) = ast.parse(dedent(text)).body
    except (SyntaxError, ValueError):
        return None
    return statement


def _statement_at(text: str, start: int, following: re.Pattern[str]) -> ast.stmt | None:
    """The statement that begins there and ends before one that looks like ``following``."""
    end = following.search(text, text.find("\n", start))
    return _statement(text[start : end.start() if end else None])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, _BLOCKS):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a meaning to, imports from other modules left out."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return []
    return [
        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
    ]


def _assigned(node: ast.AST) -> set[str]:
    """The attributes of ``self`` that are assigned in it."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def _strings(node: ast.AST) -> list[str]:
    return [
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
