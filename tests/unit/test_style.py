"""What the house asks of docstrings and names, where ruff has no rule for it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

FOLDERS = ("flashmoa", "server_patches/flashmoa_sglang", "benchmarks/flashmoa_bench", "examples")
# Words that a sentence begins with when it describes instead of saying what to do.
NOT_VERBS = frozenset(
    """
    a all an and another any are as at because before both by each either every for from half
    has he his how if in is it its like more most no nobody none not nothing of on one only or
    other others same several she since so some somebody something such than that the their
    them then there these they this those through to two under until up what whatever when
    where whether which while who whoever whom whose why with within without you your
    """.split()  # noqa: SIM905
)


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(one) for one in function.decorator_list]
    return any(name.endswith(("property", ".getter")) for name in names)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Properties are read like attributes, so that theirs may name what they hold."""
    wrong: list[str] = []
    for path, module in modules():
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_property(node):
                continue
            first = (ast.get_docstring(node) or "do").split()[0].strip(",.:;()'\"*`").lower()
            if first in NOT_VERBS:
                wrong.append(f"{path}:{node.lineno} {node.name}: begins with {first!r}")
    assert not wrong, "\n".join(wrong)


def test_files_have_at_most_300_lines() -> None:
    long = [
        f"{path}: {len((ROOT / path).read_text().splitlines())}"
        for path, _ in modules()
        if len((ROOT / path).read_text().splitlines()) > 300
    ]
    assert not long, "\n".join(long)


def test_no_two_classes_of_a_distribution_have_the_same_name() -> None:
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, module in modules():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                where[path.parts[0], node.name].append(str(path))
    twice = {name: paths for (_, name), paths in where.items() if len(paths) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in twice.items())
