"""What SGLang's source defines, read without importing any of it.

Importing takes most of an engine's start, and attributes that a class sets on itself while it
runs are in no loaded class at all: both are why the source is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from flashmoa_sglang.internals.modules import Class, Module
from flashmoa_sglang.internals.texts import FUNCTIONS

# What instances have of base classes outside of SGLang, as far as the plugin uses it, by how the
# name of such a class ends.
_OF_OTHERS = {
    "Enum": {"name", "value"},
    "Module": {
        "_buffers",
        "_parameters",
        "modules",
        "named_buffers",
        "named_parameters",
        "parameters",
    },
    "BaseModel": {"model_dump_json"},
}
_THERE = ast.Pass()


class Source:
    """SGLang's modules, read when they are asked for.

    Args:
        root: the folder of the package ``sglang``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """``None``: there is no such module, or its source is not there."""
        if name not in self._modules:
            self._modules[name] = self.read(name)
        return self._modules[name]

    def read(self, name: str) -> Module | None:
        """The same, each time anew."""
        top, *parts = name.split(".")
        if top != "sglang":
            return None
        folder = self._root.joinpath(*parts)
        for file, is_package in (
            (folder / "__init__.py", True),
            (folder.with_suffix(".py"), False),
        ):
            try:
                return Module(name, self.text(file), is_package=is_package)
            except (OSError, UnicodeDecodeError):
                continue
        # A folder without a file of its own is a package, too.
        return Module(name, "", is_package=True) if folder.is_dir() else None

    def text(self, file: Path) -> str:
        """Raises: OSError, UnicodeDecodeError."""
        return file.read_text(encoding="utf-8")

    def submodules(self, package: str) -> Iterator[Module]:
        """The modules of a package, itself not among them."""
        folder = self._root.joinpath(*package.split(".")[1:])
        for file in sorted(folder.glob("*.py")):
            found = self.module(f"{package}.{file.stem}")
            if file.stem != "__init__" and found is not None:
                yield found

    def find(self, module: str, name: str) -> ast.AST | Class | Module | None:
        """What ``from module import name`` gives; ``None`` where that fails.

        A name that comes from outside of SGLang is there, whatever it is.
        """
        return self._find(module, name, set())

    def _find(
        self, module: str, name: str, seen: set[tuple[str, str]]
    ) -> ast.AST | Class | Module | None:
        if (module, name) in seen:
            return None
        seen.add((module, name))
        place = self.module(module)
        if place is None:
            return None if module.split(".")[0] == "sglang" else _THERE
        found = place.glimpse(name)
        for star in place.stars if found is None else ():
            found = found or self._find(star, name, seen)
        found = found or place.find(name) or self.module(f"{module}.{name}")
        return self._find(*found, seen) if isinstance(found, tuple) else found

    def lineage(self, one: Class) -> Iterator[Class | str]:
        """A class and its bases, nearest first; those outside of SGLang by their last name."""
        yield one
        for base in one.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Attribute):
                yield base.attr
            elif isinstance(base, ast.Name):
                found = self.find(one.module.name, base.id)
                if isinstance(found, Class):
                    yield from self.lineage(found)
                else:
                    yield base.id

    def member(self, one: Class, name: str) -> ast.AST | None:
        """A method or attribute that instances of a class have, of its own or of a base."""
        lineage = list(self.lineage(one))
        classes = [each for each in lineage if isinstance(each, Class)]
        for each in classes:
            if (found := each.glimpse(name)) is not None:
                return found
        for each in lineage:
            # ``IntEnum`` and the like have what an ``Enum`` has.
            if isinstance(each, str) and any(
                each.endswith(kind) and name in has for kind, has in _OF_OTHERS.items()
            ):
                return _THERE
        return next((found for each in classes if (found := each.find(name))), None)

    def constructor(self, one: Class) -> ast.arguments | None:
        """What making an instance takes; ``None`` where that is not said."""
        init = self.member(one, "__init__")
        if isinstance(init, FUNCTIONS):
            return init.args
        classes = [each for each in self.lineage(one) if isinstance(each, Class)]
        fields = {name: its for each in reversed(classes) for name, its in each.fields.items()}
        if not fields:
            return None
        needed = [name for name, optional in fields.items() if not optional]
        others = [name for name, optional in fields.items() if optional]
        return ast.arguments(
            posonlyargs=[],
            args=[ast.arg(name) for name in ("self", *needed, *others)],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[ast.Constant(None) for _ in others],
        )
