"""Test the rules for the project's own source that ruff does not have."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = (
    ROOT / "flashmoa",
    ROOT / "server_patches" / "flashmoa_sglang",
    ROOT / "server_patches" / "flashmoa_cpu",
    ROOT / "benchmarks" / "flashmoa_bench",
    ROOT / "examples",
)
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


@pytest.fixture(scope="module")
def sources() -> dict[Path, ast.Module]:
    """All modules, by their files."""
    files = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in files}


def name_of(path: Path) -> str:
    """Return the name that a module is imported by."""
    (package,) = [one for one in PACKAGES if path.is_relative_to(one)]
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(one) for one in function.decorator_list]
    return any(name.endswith(("property", ".getter")) for name in names)


def type_checking_imports(module: ast.Module) -> list[ast.stmt]:
    conditions = [node for node in module.body if isinstance(node, ast.If)]
    checking = [node for node in conditions if "TYPE_CHECKING" in ast.unparse(node.test)]
    return [statement for node in checking for statement in node.body]


def find_imports(
    sources: dict[Path, ast.Module],
    statements: Callable[[ast.Module], Iterable[ast.AST]],
    files: dict[Path, ast.Module] | None = None,
) -> dict[str, set[str]]:
    """Return the modules of the project that ``statements`` of each file import.

    Args:
        files: the importing files, by default all of ``sources``.
    """
    modules = {name_of(path) for path in sources}
    found: dict[str, set[str]] = defaultdict(set)
    for path, module in (files or sources).items():
        name = str(path) if files else name_of(path)
        for node in statements(module):
            if isinstance(node, ast.Import):
                found[name] |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for one in node.names:
                    submodule = f"{node.module}.{one.name}"
                    found[name].add(submodule if submodule in modules else node.module)
        found[name] = (found[name] & modules) - {name}
    return found


def test_docstrings_begin_with_a_verb(sources: dict[Path, ast.Module]) -> None:
    """Properties are read like attributes, so that their docstrings may begin with a noun."""
    wrong: list[str] = []
    for path, module in sources.items():
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_property(node):
                continue
            first = (ast.get_docstring(node) or "do").split()[0].strip(",.:;()'\"*`").lower()
            if first in NOT_VERBS:
                wrong.append(f"{path}:{node.lineno} {node.name}: begins with {first!r}")
    assert not wrong, "\n".join(wrong)


def test_files_have_at_most_600_lines(sources: dict[Path, ast.Module]) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources}
    assert not {path: length for path, length in lengths.items() if length > 600}


def test_functions_have_at_most_60_lines(sources: dict[Path, ast.Module]) -> None:
    long = {
        f"{path}:{node.lineno} {node.name}"
        for path, module in sources.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    }
    assert not long


def test_classes_of_a_package_differ_in_name(sources: dict[Path, ast.Module]) -> None:
    where: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path, module in sources.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                where[name_of(path).partition(".")[0], node.name].append(path)
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_modules_import_in_no_circle(sources: dict[Path, ast.Module]) -> None:
    """An import for annotations counts: two modules that name each other are one."""
    imports = find_imports(sources, lambda module: module.body + type_checking_imports(module))
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))


def test_small_modules_are_used_twice_or_tested(sources: dict[Path, ast.Module]) -> None:
    """A small module that only one other imports is a part of that one, in another place.

    Modules that programs import, or run, are no part of another one.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in find_imports(sources, ast.walk).items():
        for one in imported if not name.startswith("examples.") else ():
            importers[one].add(name)
    tests = {path: ast.parse(path.read_text()) for path in (ROOT / "tests" / "unit").rglob("*.py")}
    tested = set[str]().union(*find_imports(sources, ast.walk, tests).values())
    small = {
        f"{name} is only imported by {importers[name]}"
        for path in sources
        if len(path.read_text().splitlines()) < 100
        and len(importers[name := name_of(path)]) == 1
        and path.stem not in ("__init__", "__main__", "serve", "hash_causal_lm")
        and name not in tested
    }
    assert not small


def test_no_file_has_marks_of_a_merge() -> None:
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    texts = {file: file.read_text(errors="replace") for file in files if file.is_file()}
    assert not [file for file, text in texts.items() if any(f"\n{mark}" in text for mark in marks)]
