"""SGLang's modules and classes, of which only those definitions are parsed that are asked for.

Parsing whole files would take long. So the text of a module is split at its functions and classes,
and that of a class at its methods.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Where an imported name comes from: the module, and the name there.
Imported = tuple[str, str]
# Stands for a definition of which only the existence is known.
SOMETHING = ast.Pass()

# Statements that contain others in the same scope, which may thus define names of that scope.
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)


class Outline:
    """The statements of a module or class, parsed without the bodies of its functions and classes.

    Args:
        text: the source of the module, or of the class with its ``class`` line.
        indent: white space before each statement; none for a module.

    Attributes:
        statements: the parsed statements; functions and classes among them have empty bodies.
        texts: the source of these functions and classes by name.

    Raises: SyntaxError if a line in a string of a body looks like the end of the body.
    """

    def __init__(self, text: str, indent: str) -> None:
        self.texts: dict[str, str] = {}

        def empty_body(match: re.Match[str]) -> str:
            self.texts[match[2]] = match[0]
            return f"{indent}{match[1]} {match[2]}{'' if match[1] == 'class' else '()'}: ...\n"

        first_line = rf"^{indent}(class|(?:async )?def) (\w+).*\n"
        # A definition goes on with lines that are indented further, or empty, or comments, or that
        # close the brackets of its parameters.
        other_lines = rf"(?:(?:{indent}[ \t)\]]|#).*\n|[ \t]*\n)*"
        definition = first_line + other_lines
        tree = ast.parse(re.sub(definition, empty_body, f"{text}\n", flags=re.MULTILINE))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        self.statements = classes[0].body if indent else tree.body


class Class:
    """A class of SGLang: what it defines itself, without its bases, and the names of the bases."""

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
        """Return what defines an attribute: a method, a field, or a method that assigns to it.

        Return ``None`` if the class itself does not define it.
        """
        if name not in self._text:
            return None
        if (found := self._statements.get(name)) is not None:
            return self._method(found) if isinstance(found, FUNCTIONS) else found
        methods = (node for node in self._statements.values() if isinstance(node, FUNCTIONS))
        return next((node for node in methods if self._assigns(node, name)), None)

    def has_string(self, value: str) -> bool:
        """Return whether the source of the class contains ``value`` as a string."""
        return _has_string(self._text, value)

    def fields(self) -> dict[str, bool]:
        """Return, by name, whether each field of a dataclass or the like has a default."""
        return {
            name: statement.value is not None
            for name, statement in self._statements.items()
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
    def _statements(self) -> dict[str, ast.stmt]:
        """The statements of the class by the names that they define."""
        found: dict[str, ast.stmt] = {}
        for statement in _scope(self._outline.statements):
            for name in _defined(statement):
                found[name] = statement
                if name == "__slots__":
                    found |= dict.fromkeys(_strings(statement), statement)
        return found

    def _method(self, node: Function) -> Function:
        """Return a method with its body, given the method without it from the outline."""
        text = self._outline.texts.get(node.name)
        if node.name not in self._methods and text is not None:
            # The text is indented, which is valid only inside another statement.
            nodes = ast.walk(ast.parse(f"if True:\n{text}"))
            found = next(node for node in nodes if isinstance(node, FUNCTIONS))
            found.decorator_list = node.decorator_list
            self._methods[node.name] = found
        return self._methods.get(node.name, node)

    def _assigns(self, method: Function, name: str) -> bool:
        """Return whether a method assigns to the attribute ``name`` of ``self``."""
        text = self._outline.texts.get(method.name)
        if text is not None and f"self.{name}" not in text:
            return False
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
            for node in ast.walk(self._method(method))
        )


class Module:
    """A module of SGLang.

    Args:
        name: the name by which it is imported.
        text: its source.
    """

    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        self.name = name
        self.text = text
        self._package = name if is_package else name.rpartition(".")[0]

    def find(self, name: str) -> ast.AST | Class | Imported | None:
        """Return what a name stands for in the imported module; ``None`` if it has no such name."""
        found = self._names.get(name) if name in self.text else None
        if found is None and "__getattr__" in self._names and _has_string(self.text, name):
            return SOMETHING  # The module's ``__getattr__`` makes it from a table of names.
        if isinstance(found, FUNCTIONS) and name in self._outline.texts:
            return ast.parse(self._outline.texts[name]).body[0]
        return found

    def classes(self) -> Iterator[Class]:
        """Yield the classes that the module defines at its top level."""
        yield from (found for found in self._names.values() if isinstance(found, Class))

    def assigns(self, name: str) -> bool:
        """Return whether the module assigns to an attribute of this name, of any object."""
        return re.search(rf"\.{name}\s*=[^=]", self.text) is not None

    @property
    def stars(self) -> list[str]:
        """The names of the modules from which it imports ``*``."""
        return re.findall(r"^from ([\w.]+) import \*", self.text, re.MULTILINE)

    def whole_class(self, name: str) -> str:
        """Return the source of a class, found by parsing the whole module.

        This is for a class whose text was cut too early, at a line of a string.
        """
        nodes = _scope(ast.parse(self.text).body)
        return ast.unparse(next(node for node in nodes if name in _defined(node)))

    @cached_property
    def _outline(self) -> Outline:
        try:
            return Outline(self.text, "")
        except SyntaxError:
            return Outline(ast.unparse(ast.parse(self.text)), "")

    @cached_property
    def _names(self) -> dict[str, ast.AST | Class | Imported]:
        found: dict[str, ast.AST | Class | Imported] = {}
        for statement in _scope(self._outline.statements):
            if isinstance(statement, ast.ImportFrom):
                found |= self._imports(statement)
            elif isinstance(statement, ast.ClassDef):
                text = self._outline.texts.get(statement.name) or ast.unparse(statement)
                found[statement.name] = Class(self, statement.name, text)
            elif isinstance(statement, FUNCTIONS):
                found[statement.name] = statement
            else:
                # A class that was defined before stays found: what takes its name has, as a rule,
                # the same attributes.
                found = dict.fromkeys(_defined(statement), statement) | found
        return found

    def _imports(self, node: ast.ImportFrom) -> dict[str, Imported]:
        source = node.module or ""
        if node.level:
            parents = self._package.split(".")
            source = ".".join([*parents[: len(parents) - node.level + 1], source]).strip(".")
        return {alias.asname or alias.name: (source, alias.name) for alias in node.names}


def parameters(text: str) -> ast.arguments:
    """Parse a function's parameters, which have no annotations, from the text in its brackets."""
    function = ast.parse(f"lambda {text}: ...", mode="eval").body
    assert isinstance(function, ast.Lambda)
    return function.args


def _has_string(text: str, value: str) -> bool:
    return re.search(rf"[\"']{re.escape(value)}[\"']", text) is not None


def _scope(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, those within ``if``, ``try`` and the like among them."""
    for statement in body:
        yield statement
        if isinstance(statement, _BLOCKS):
            for block in ("body", "orelse", "finalbody"):
                yield from _scope(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _scope(handler.body)


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines; none for ``from ... import``."""
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
        inner.value
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    ]
