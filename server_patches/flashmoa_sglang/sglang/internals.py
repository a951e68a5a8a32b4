"""Checks that SGLang has the names that the plugin uses, as ``internals.txt`` lists them.

A missing name would end an engine when it is used, perhaps long after its start. So the plugin
looks for all names before the engine starts, in SGLang's source: importing SGLang takes most of a
start, and no loaded class shows the attributes that its objects set on themselves.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from flashmoa_sglang.sglang.releases import served_as

# Features of engines, by the arguments that turn them on.
EVERYBODY = "every engine"
ASYNCEP, KV_OFF = "--flashmoa-asyncep", "--flashmoa-kv-cache off"
PD, CPU = "--disaggregation-mode", "--device cpu"
FEATURES = (ASYNCEP, KV_OFF, PD, CPU)
LIST = Path(__file__).with_suffix(".txt")
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Definitions:
    """The definitions of a module, or of a class, where they have an ``indent``.

    Attributes:
        names: the text of each function and class, up to the next one; empty for other names. A
            class has every attribute that it reads or sets on ``self``.
        imports: each imported name with its module and its name there.
    """

    def __init__(self, text: str, indent: str = "") -> None:
        self.text = text
        others = r"^(?:    )?(\w+) *[:=]" + (r"|\bself\.(\w+)" if indent else "")
        self.names = {match[match.lastindex or 0]: "" for match in re.finditer(others, text, re.M)}
        for part in re.split(rf"^{indent}(?=(?:(?:async )?def|class) \w)", text, flags=re.M)[1:]:
            self.names[re.split(r"\W+", part.removeprefix("async "), maxsplit=2)[1]] = part
        self.imports: dict[str, tuple[str, str]] = {}
        for place, names in re.findall(r"^ *from ([\w.]+) import (\([^)]*\)|.*)", text, re.M):
            for name, alias in re.findall(r"(\w+|\*)(?: as (\w+))?", names):
                self.imports[alias or (place if name == "*" else name)] = (place, name)


class Source:
    """SGLang's source in ``root``, the folder of its package; it need not be installed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Definitions | None] = {}
        self._classes: dict[tuple[str, str], list[Definitions]] = {}

    def read(self, file: Path) -> str:
        return file.read_text(encoding="utf-8")

    def module(self, name: str) -> Definitions | None:
        if name not in self._modules:
            path = self.root.joinpath(*name.split(".")[1:])
            files = filter(Path.is_file, (path / "__init__.py", path.with_suffix(".py")))
            text = next((self.read(file) for file in files), "" if path.is_dir() else None)
            self._modules[name] = None if text is None else Definitions(text)
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[str, str] | None:
        """Find the object that ``from module import name`` gives; return its module and its text.

        The text is empty if the object is no function or class, or comes from outside of SGLang.
        """
        if not module.startswith("sglang."):
            return module, ""
        place = self.module(module)
        if place is None:
            return None
        if name in place.names:
            return module, place.names[name]
        if name in place.imports:
            return self.find(*place.imports[name])
        stars = (star for star, what in place.imports.values() if what == "*")
        if found := next(filter(None, (self.find(star, name) for star in stars)), None):
            return found
        # Some modules make names from a table, in their ``__getattr__``.
        is_made = "__getattr__" in place.names and f'"{name}"' in place.text
        is_module = re.search(rf"^import .*\b{name}\b", place.text, re.M)
        return (module, "") if is_made or is_module or self.module(f"{module}.{name}") else None

    def lineage(self, module: str, name: str) -> list[Definitions]:
        """Return a class and its bases in SGLang, nearest first; none if there is no such class."""
        if (module, name) not in self._classes:
            place, text = self.find(module, name) or ("", "")
            lineage = self._classes[module, name] = [Definitions(text, "    ")] if text else []
            head = re.match(r"class \w+\(([^)]*)\)", text)
            for base in re.findall(r"[\w.]+", head[1]) if head else []:
                lineage += self.lineage(place, base)
        return self._classes[module, name]


@dataclass
class Findings:
    """The result of looking for names in one SGLang.

    Attributes:
        seen: the names that were looked for, except in missing classes: these may have moved, and
            the plugin does not name them itself.
        lacking: the missing names.
        otherwise: the functions that take other arguments, each with the difference.
    """

    source: Source
    seen: set[str] = field(default_factory=set)
    lacking: list[str] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """The problem with SGLang, in words that follow its name; empty if all is right."""
        lacking = f"has no {', '.join(self.lacking)}" if self.lacking else ""
        otherwise = f"takes other arguments for {', '.join(self.otherwise)}"
        return "; ".join(filter(None, (lacking, otherwise if self.otherwise else "")))

    def look(self, owners: str, name: str, problem: Callable[[Signature], str]) -> None:
        """Look for a name in several owners, and check the signature of the first that has it."""
        found: list[str | None] = []
        for owner in owners.split("|"):
            module, _, kind = f"sglang.srt.{owner}".partition(":")
            if kind:
                found += [one.names.get(name) for one in self.source.lineage(module, kind)]
            else:
                found.append((self.source.find(module, name) or (module, None))[1])
        if not found:
            return
        shown = f"sglang.srt.{owners.split('|')[0].replace(':', '.')}.{name}"
        self.seen.add(shown)
        text = next((text for text in found if text is not None), None)
        if text is None:
            self.lacking.append(shown)
        elif (takes := _signature(text)) and (wrong := problem(takes)):
            self.otherwise.append(f"{shown} ({wrong})")


@cache
def installed() -> Source | None:
    """Return the installed SGLang's source; ``None`` where there is none."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    return Source(Path(package.submodule_search_locations[0]))


def looked_at(
    release: str,
    source: Source,
    feature: str = EVERYBODY,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
) -> Findings:
    """Look in a release for the names that engines with a feature use.

    Args: hooks: the hook functions by their targets.
    """
    findings = Findings(source)
    for target, hook in (hooks or {}).items():
        owner, _, name = target.removeprefix("sglang.srt.").rpartition(".")
        if source.module(f"sglang.srt.{owner}") is None:
            owner = ":".join(owner.rsplit(".", 1))
        ours = Signature(list(inspect.signature(hook).parameters.values())[1:])
        findings.look(owner, name, lambda takes, ours=ours: _hook_problem(takes, ours))
    for owners, name, call in used(release, feature):
        findings.look(owners, name, lambda takes, call=call: _call_problem(takes, call))
    return findings


def used(release: str, feature: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield each name that engines with a feature use: its owners, the name, a call's arguments."""
    number = int(served_as(release).split(".")[2])
    for section in re.split(r"^\[", LIST.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, *entries = re.split(r"\n(?=\S)", section.strip())
        for owners, *uses in map(str.split, entries if head == f"{feature}]" else ()):
            for releases, _, names in (use.rpartition(":") for use in uses):
                first, _, last = releases.partition("-")
                is_used = int(first or 0) <= number <= int(last or number)
                for name in names.split(";") if is_used else ():
                    name, bracket, given = name.strip(")").partition("(")
                    for owner in owners.split("&"):
                        yield owner, name, given if bracket else None


def _signature(text: str) -> Signature | None:
    """Return the signature of the function or constructor in a text, without defaults' values."""
    if text.startswith("class"):
        text = Definitions(text, "    ").names.get("__init__", "")
    head = re.match(r"[\w ]+(\((?:.|\n)*?\))(?: *->(?:.|\n)*?)?:(?: *#.*)?\n", text)
    if head is None:
        return None
    function = ast.parse(f"def function{head[1]}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    taken = function.args
    taken.defaults = [ast.Constant(None) for _ in taken.defaults]
    taken.kw_defaults = [one and ast.Constant(None) for one in taken.kw_defaults]
    made = ast.fix_missing_locations(ast.Expression(ast.Lambda(taken, ast.Constant(None))))
    return inspect.signature(eval(compile(made, "<signature>", "eval")))


def _call_problem(takes: Signature, call: str | None) -> str:
    """Say why a function, not counting ``self``, cannot be called with arguments (``_,key=_``)."""
    if call is None:
        return ""
    parameters = [one for one in takes.parameters.values() if one.name not in ("self", "cls")]
    return _bind(Signature(parameters), call.split(",").count("_"), re.findall(r"(\w+)=", call))


def _hook_problem(theirs: Signature, ours: Signature) -> str:
    """Say why a hook, without ``original``, cannot be called like the function that it wraps."""
    takes = list(theirs.parameters.values())
    # With all arguments, and with the required ones alone.
    for given in (takes, [one for one in takes if one.default is Parameter.empty]):
        positional = sum(one.kind in _BY_POSITION for one in given)
        keywords = [one.name for one in given if one.kind is Parameter.KEYWORD_ONLY]
        if problem := _bind(ours, positional, keywords):
            return problem
    for one, its in zip(takes, ours.parameters.values(), strict=False):
        meant = its.name.lstrip("_")
        if {one.kind, its.kind} <= set(_BY_POSITION) and one.name not in ("self", meant):
            return f"{one.name!r} in place of {meant!r}"
    return ""


def _bind(takes: Signature, positional: int, keywords: Sequence[str]) -> str:
    try:
        takes.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return ""
