"""Which models' experts can be offloaded, by SGLang's sources, is what the documentation lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from flashmoa_sglang.asyncep.offloader import COMPUTE_THEMSELVES
from flashmoa_sglang.releases import installed

ROOT = Path(__file__).parents[3]
EXPERTS = {"FusedMoE", "get_moe_impl_class"}
HANDED_OVER = {"make_layers", "make_layers_non_pp"}
MODELS = "sglang.srt.models."


# The modules of models that are for speculative decoding only end in these.
DRAFTS = ("_eagle", "_mtp", "_nextn", "_dspark")


@dataclass
class Definition:
    """A class, function or variable of a module.

    ``calls``: functions that it calls. ``names``, ``bases``: definitions in modules of models that
    it mentions, or derives from.
    """

    calls: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)


def read_definitions() -> dict[str, Definition]:
    """Return the definitions in SGLang's modules of models, by module and name."""
    spec = find_spec("sglang")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    definitions: dict[str, Definition] = {}
    for path in folder.rglob("*.py"):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        nodes = {name: node for node in tree.body for name in defined_names(node)}
        known = {name: f"{module}.{name}" for name in nodes} | dict(imports(tree))
        for name, node in nodes.items():
            definitions[f"{module}.{name}"] = Definition(
                {called for inner in ast.walk(node) if (called := called_name(inner))},
                known_names(ast.walk(node), known),
                known_names(getattr(node, "bases", []), known),
            )
    return definitions


def defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name != "EntryClass"]


def known_names(nodes: Iterable[ast.AST], known: dict[str, str]) -> set[str]:
    names = set[str]()
    for name in filter(None, map(dotted_name, nodes)):
        first, dot, rest = name.partition(".")
        if first in known:
            names |= {known[first], f"{known[first]}{dot}{rest}"}
    return names


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module imports from modules of models: its name there, and its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = f"{MODELS}{node.module}." if node.level == 1 else f"{node.module}."
            if module.startswith(MODELS):
                for alias in node.names:
                    name = alias.asname or alias.name
                    yield name, f"{module}{alias.name}".removeprefix(MODELS)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith(MODELS):
                    yield alias.asname, alias.name.removeprefix(MODELS)


def dotted_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def called_name(node: ast.AST) -> str | None:
    name = dotted_name(node.func) if isinstance(node, ast.Call) else None
    return name.removeprefix("nn.") if name else None


def follow(definitions: dict[str, Definition], start: str, by: str) -> set[str]:
    """Return the definitions that can be reached by ``names`` or ``bases``, with the first."""
    seen, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in seen:
            seen.add(name)
            waiting.extend(getattr(definitions[name], by))
    return seen


def classify_models() -> tuple[set[str], set[str]]:
    """Return the modules whose experts can be offloaded, and those whose experts all stay."""
    definitions = read_definitions()
    creators = {name for name, definition in definitions.items() if definition.calls & EXPERTS}
    works, stays, offloaded = set[str](), set[str](), set[str]()
    for name in definitions:
        module = name.partition(".")[0].removesuffix("_common")
        experts = creators & follow(definitions, name, "names")
        bases = follow(definitions, name, "bases")
        if not experts or module.endswith(DRAFTS):
            continue
        if any(definitions[base].calls & HANDED_OVER for base in bases):
            works.add(module)
            offloaded |= experts
        elif "ModuleList" in definitions[name].calls:
            stays.add(module)
    stays |= {name.partition(".")[0].removesuffix("_common") for name in creators - offloaded}
    modules = {name.partition(".")[0] for name in definitions}
    themselves = {module.removeprefix(MODELS) for module in COMPUTE_THEMSELVES} & modules
    return works - themselves, (stays - works) | themselves


def test_the_documentation_says_which_models_work() -> None:
    if installed() != "0.5.18":
        pytest.skip("the documentation's list is of SGLang 0.5.18")
    text = (ROOT / "docs" / "asyncep.md").read_text()
    (section,) = re.findall(r"^## Which models\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    listed = [part for part in section.split("\n\n") if part.startswith("`") or "is made:" in part]
    works, stays, *_ = [set(re.findall(r"`(\w+)`", part)) for part in listed]
    assert (works, stays) == classify_models()
