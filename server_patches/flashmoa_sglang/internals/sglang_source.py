"""What SGLang's source defines, read without importing any of it.

Importing takes most of an engine's start, and attributes that a class sets on itself while it runs
are in no loaded class: both are reasons to read the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from flashmoa_sglang.internals.sglang_modules import (
    FUNCTIONS,
    SOMETHING,
    Class,
    Imported,
    Module,
    parameters,
)

# What instances have of base classes outside of SGLang, as far as the plugin uses it, by how the
# name of such a class ends.
_OUTSIDE_MEMBERS = {
    "Enum": ("name", "value"),
    "Module": (
        *("_buffers", "_parameters", "modules"),
        *("named_buffers", "named_parameters", "parameters"),
    ),
    "BaseModel": ("model_dump_json",),
}


class Source:
    """SGLang's modules, read when they are asked for.

    Args:
        root: the folder of the package ``sglang``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module; ``None``: there is no such module, or its source is not there."""
        if name not in self._modules:
            self._modules[name] = self.read(name)
        return self._modules[name]

    def read(self, name: str) -> Module | None:
        """Read a module, each time it is called."""
        top, *parts = name.split(".")
        folder = self._root.joinpath(*parts)
        if top != "sglang":
            return None
        for file in (folder / "__init__.py", folder.with_suffix(".py")):
            try:
                return Module(name, self.text(file), is_package=file.name == "__init__.py")
            except (OSError, UnicodeDecodeError):
                continue
        # A folder without a file of its own is a package, too.
        return Module(name, "", is_package=True) if folder.is_dir() else None

    def text(self, file: Path) -> str:
        """Read a file. Raises: OSError, UnicodeDecodeError."""
        return file.read_text(encoding="utf-8")

    def submodules(self, package: str) -> Iterator[Module]:
        """Yield the modules of a package, itself not among them."""
        folder = self._root.joinpath(*package.split(".")[1:])
        for file in sorted(folder.glob("*.py")):
            found = self.module(f"{package}.{file.stem}")
            if file.stem != "__init__" and found is not None:
                yield found

    def find(
        self, module: str, name: str, seen: frozenset[Imported] = frozenset()
    ) -> ast.AST | Class | Module | None:
        """Return what ``from module import name`` gives; ``None`` where that fails.

        A name that comes from outside of SGLang is there, whatever it is. ``seen``: the imports
        that have led here.
        """
        place = self.module(module)
        if (module, name) in seen or place is None:
            return None if module.split(".")[0] == "sglang" else SOMETHING
        seen |= {(module, name)}
        found = place.find(name)
        for star in place.stars if found is None else ():
            found = found or self.find(star, name, seen)
        found = found or self.module(f"{module}.{name}")
        return self.find(*found, seen) if isinstance(found, tuple) else found

    def lineage(self, one: Class) -> Iterator[Class | str]:
        """Yield a class and its bases, nearest first; those outside of SGLang by their name."""
        yield one
        for base in one.bases:
            found = self.find(one.module.name, base)
            yield from self.lineage(found) if isinstance(found, Class) else [base]

    def member(self, one: Class, name: str) -> ast.AST | None:
        """Return a method or attribute that instances of a class have, its own or a base's."""
        for each in self.lineage(one):
            if isinstance(each, Class):
                found = each.member(name)
            else:
                # ``IntEnum`` and the like have what an ``Enum`` has.
                known = [has for kind, has in _OUTSIDE_MEMBERS.items() if each.endswith(kind)]
                found = SOMETHING if any(name in has for has in known) else None
            if found is not None:
                return found
        return None

    def constructor(self, one: Class) -> ast.arguments | None:
        """Return what making an instance takes; ``None`` where that is not said."""
        init = self.member(one, "__init__")
        if isinstance(init, FUNCTIONS):
            return init.args
        classes = [each for each in self.lineage(one) if isinstance(each, Class)]
        fields = {name: its for each in reversed(classes) for name, its in each.fields().items()}
        needed = [name for name, optional in fields.items() if not optional]
        others = [name for name, optional in fields.items() if optional]
        text = ", ".join(["self", *needed, *(f"{name}=None" for name in others)])
        return parameters(text) if fields else None
