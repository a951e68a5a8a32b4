"""Modules and classes of SGLang as text, of which only the definitions asked for are parsed.

The files are long: a module is split at its functions and classes, and a class at its methods.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A name that is imported: the module it comes from, and its name there.
Imported = tuple[str, str]
# What stands for a name that is there, whatever it is.
SOMETHING = ast.Pass()

# Statements around others that are executed, or may be, where they stand.
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)


class Outline:
    """The statements of a module or class, of whose functions and classes no body is parsed.

    Args:
        text: the source; of a class with its first line.
        indent: of the statements.

    Attributes:
        statements: functions and classes among them are empty.
        texts: the source of these by name.

    Raises: SyntaxError where a line of a string looks like the end of a definition.
    """

    def __init__(self, text: str, indent: str) -> None:
        self.texts: dict[str, str] = {}

        def empty(match: re.Match[str]) -> str:
            self.texts[match[2]] = match[0]
            return f"{indent}{match[1]} {match[2]}{'' if match[1] == 'class' else '()'}: ...\n"

        first = rf"^{indent}(class|(?:async )?def) (\w+).*\n"
        others = rf"(?:(?:{indent}[ \t)\]]|#).*\n|[ \t]*\n)*"
        tree = ast.parse(re.sub(first + others, empty, f"{text}\n", flags=re.MULTILINE))
        classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
        self.statements = classes[0].body if indent else tree.body


class Class:
    """A class: what it defines itself, and the names of its bases."""

    def __init__(self, module: Module, name: str, text: str) -> None:
        self.module = module
        self._name = name
        self._text = text
        self._methods: dict[str, Function] = {}

    @property
    def bases(self) -> list[str]:
        head = re.match(r"class \w+([^:]*):", self._text)
        return re.findall(r"[\w.]+", head[1]) if head is not None else []

    def member(self, name: str) -> ast.AST | None:
        """Return a method, a field, or the method that assigns it to ``self``."""
        if name not in self._text:
            return None
        if (found := self._fields.get(name)) is not None:
            return self._method(found) if isinstance(found, FUNCTIONS) else found
        methods = (one for one in self._fields.values() if isinstance(one, FUNCTIONS))
        return next((one for one in methods if self._assigns(one, name)), None)

    def has_string(self, value: str) -> bool:
        return _has_string(self._text, value)

    def fields(self) -> dict[str, bool]:
        """Return what a dataclass or the like declares, and whether that has a default."""
        return {
            name: statement.value is not None
            for name, statement in self._fields.items()
            if isinstance(statement, ast.AnnAssign)
        }

    @cached_property
    def _outline(self) -> Outline:
        try:
            return Outline(self._text, "    ")
        except (SyntaxError, ValueError):
            self._text = self.module.whole_class(self._name)
            return Outline(self._text, "    ")

    @cached_property
    def _fields(self) -> dict[str, ast.stmt]:
        found: dict[str, ast.stmt] = {}
        for statement in _statements(self._outline.statements):
            for name in _defined(statement):
                found[name] = statement
                if name == "__slots__":
                    found |= dict.fromkeys(_strings(statement), statement)
        return found

    def _method(self, node: Function) -> Function:
        """Parse a method of which the outline has the name and the decorators."""
        text = self._outline.texts.get(node.name)
        if node.name not in self._methods and text is not None:
            within = ast.walk(ast.parse(f"if True:\n{text}"))
            found = next(one for one in within if isinstance(one, FUNCTIONS))
            found.decorator_list = node.decorator_list
            self._methods[node.name] = found
        return self._methods.get(node.name, node)

    def _assigns(self, method: Function, name: str) -> bool:
        text = self._outline.texts.get(method.name)
        if text is not None and f"self.{name}" not in text:
            return False
        return any(
            isinstance(one, ast.Attribute)
            and one.attr == name
            and isinstance(one.ctx, ast.Store)
            and ast.unparse(one.value) == "self"
            for one in ast.walk(self._method(method))
        )


class Module:
    """A module.

    Args:
        name: as it is imported.
        text: its source.
    """

    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        self.name = name
        self.text = text
        self._package = name if is_package else name.rpartition(".")[0]

    def find(self, name: str) -> ast.AST | Class | Imported | None:
        """Return what a name stands for once the module is imported."""
        found = self._names.get(name) if name in self.text else None
        if found is None and "__getattr__" in self._names and _has_string(self.text, name):
            return SOMETHING  # Made when it is asked for, from a table in the module.
        if isinstance(found, FUNCTIONS) and name in self._outline.texts:
            return ast.parse(self._outline.texts[name]).body[0]
        return found

    def classes(self) -> Iterator[Class]:
        """Yield the classes that it defines at its top."""
        yield from (found for found in self._names.values() if isinstance(found, Class))

    def assigns(self, name: str) -> bool:
        """Return whether it gives anything an attribute of this name."""
        return re.search(rf"\.{name}\s*=[^=]", self.text) is not None

    @property
    def stars(self) -> list[str]:
        """The modules all of whose names it imports."""
        return re.findall(r"^from ([\w.]+) import \*", self.text, re.MULTILINE)

    def whole_class(self, name: str) -> str:
        """Return the source of a class of which a line in a string looked like the end."""
        nodes = _statements(ast.parse(self.text).body)
        return ast.unparse(next(one for one in nodes if name in _defined(one)))

    @cached_property
    def _outline(self) -> Outline:
        try:
            return Outline(self.text, "")
        except SyntaxError:
            return Outline(ast.unparse(ast.parse(self.text)), "")

    @cached_property
    def _names(self) -> dict[str, ast.AST | Class | Imported]:
        found: dict[str, ast.AST | Class | Imported] = {}
        for statement in _statements(self._outline.statements):
            if isinstance(statement, ast.ImportFrom):
                found |= self._imports(statement)
            elif isinstance(statement, ast.ClassDef):
                text = self._outline.texts.get(statement.name) or ast.unparse(statement)
                found[statement.name] = Class(self, statement.name, text)
            elif isinstance(statement, FUNCTIONS):
                found[statement.name] = statement
            else:
                # What a class is replaced by has its attributes, as a rule.
                found = dict.fromkeys(_defined(statement), statement) | found
        return found

    def _imports(self, node: ast.ImportFrom) -> dict[str, Imported]:
        source = node.module or ""
        if node.level:
            parents = self._package.split(".")
            source = ".".join([*parents[: len(parents) - node.level + 1], source]).strip(".")
        return {alias.asname or alias.name: (source, alias.name) for alias in node.names}


def parameters(text: str) -> ast.arguments:
    """Parse what a function takes, as its definition has it in brackets."""
    made = ast.parse(f"lambda {text}: ...", mode="eval").body
    assert isinstance(made, ast.Lambda)
    return made.args


def _has_string(text: str, value: str) -> bool:
    return re.search(rf"[\"']{re.escape(value)}[\"']", text) is not None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, _BLOCKS):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines, imports from other modules left out."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [
        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
    ]


def _strings(node: ast.AST) -> list[str]:
    return [
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
