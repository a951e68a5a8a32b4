"""Test that the documentation lists the models whose experts can be moved, by SGLang's sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from flashmoa_sglang.asyncep.offloader import _COMPUTE_THEMSELVES
from flashmoa_sglang.releases import installed

ROOT = Path(__file__).parents[3]
EXPERTS = {"FusedMoE", "get_moe_impl_class"}
HANDED_OVER = {"make_layers", "make_layers_non_pp"}
MODELS = "sglang.srt.models."


# These models are for speculative decoding only.
DRAFTS = ("_eagle", "_mtp", "_nextn", "_dspark")


@dataclass
class Class:
    """A class, a function, or a variable of a module.

    Attributes:
        calls: names of functions that it calls.
        names: other names of the models' modules that it uses.
    """

    calls: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)


def classes() -> dict[str, Class]:
    """All classes of SGLang's models, by module and name."""
    spec = find_spec("sglang")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    found: dict[str, Class] = {}
    for path in folder.rglob("*.py"):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        made = {name: node for node in tree.body for name in defined(node)}
        known = {name: f"{module}.{name}" for name in made} | dict(imported(tree))
        for name, node in made.items():
            found[f"{module}.{name}"] = Class(
                {called for one in ast.walk(node) if (called := call(one))},
                known_names(ast.walk(node), known),
                known_names(getattr(node, "bases", []), known),
            )
    return found


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one.id for one in targets if isinstance(one, ast.Name) and one.id != "EntryClass"]


def known_names(nodes: Iterable[ast.AST], known: dict[str, str]) -> set[str]:
    found = set[str]()
    for name in filter(None, map(named, nodes)):
        first, dot, rest = name.partition(".")
        if first in known:
            found |= {known[first], f"{known[first]}{dot}{rest}"}
    return found


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Return the names that a module imports: the name that it uses, and the class or module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = f"{MODELS}{node.module}." if node.level == 1 else f"{node.module}."
            if module.startswith(MODELS):
                for one in node.names:
                    yield one.asname or one.name, f"{module}{one.name}".removeprefix(MODELS)
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.asname and one.name.startswith(MODELS):
                    yield one.asname, one.name.removeprefix(MODELS)


def named(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def call(node: ast.AST) -> str | None:
    name = named(node.func) if isinstance(node, ast.Call) else None
    return name.removeprefix("nn.") if name else None


def reached(found: dict[str, Class], start: str, by: str) -> set[str]:
    """Return the classes that a class reaches by its ``names`` or ``bases``, and itself."""
    seen, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name in found and name not in seen:
            seen.add(name)
            waiting.extend(getattr(found[name], by))
    return seen


def by_sources() -> tuple[set[str], set[str]]:
    """Return the modules whose experts can be moved, and those whose experts all stay."""
    found = classes()
    own = {name for name, one in found.items() if one.calls & EXPERTS}
    works, stays, moving = set[str](), set[str](), set[str]()
    for name in found:
        module = name.partition(".")[0].removesuffix("_common")
        experts = own & reached(found, name, "names")
        bases = reached(found, name, "bases")
        if not experts or module.endswith(DRAFTS):
            continue
        if any(found[one].calls & HANDED_OVER for one in bases):
            works.add(module)
            moving |= experts
        elif "ModuleList" in found[name].calls:
            stays.add(module)
    stays |= {name.partition(".")[0].removesuffix("_common") for name in own - moving}
    themselves = _COMPUTE_THEMSELVES.removeprefix(MODELS)
    return works - {themselves}, (stays - works) | {themselves}


def test_the_documentation_says_which_models_work() -> None:
    if installed() != "0.5.18":
        pytest.skip("the documentation's list is of SGLang 0.5.18")
    text = (ROOT / "docs" / "asyncep.md").read_text()
    (section,) = re.findall(r"^## Which models\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    listed = [part for part in section.split("\n\n") if part.startswith("`") or "is made:" in part]
    works, stays, *_ = [set(re.findall(r"`(\w+)`", part)) for part in listed]
    assert (works, stays) == by_sources()
