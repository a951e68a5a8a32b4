"""Whether the installed SGLang is one the plugin can hook into; needs the plugin.

The plugin looks at its targets when an engine starts; here SGLang's source is read for them,
since importing it takes most of a start.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashmoa.doctor.findings import Finding, mend, note, ok


def check_release(release: str) -> Finding:
    """SGLang's release, against those that the plugin was tested with."""
    releases = _plugin("releases")
    tested = ", ".join(releases.TESTED)
    if release in releases.TESTED:
        return ok("SGLang", f"{release}, a tested release")
    remedy = f"pip install sglang=={releases.TESTED[-1]}"
    if releases.too_old(release) is not None:
        return mend("SGLang", f"{release} is too old for the plugin; tested: {tested}", remedy)
    return note("SGLang", f"{release} is not among the tested releases {tested}", remedy)


def check_targets() -> Finding:
    """Whether everything that the plugin hooks is there."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return note("hooks", "not looked at: SGLang is not installed")
    plugin = _plugin("plugin")
    targets = [hook.target for hook in (*plugin.HTTP_HOOKS, *plugin.SCHEDULER_HOOKS)]
    root = Path(package.submodule_search_locations[0])
    sources: dict[Path, list[ast.stmt]] = {}
    missing = [target for target in targets if not _has(root, target, sources)]
    if not missing:
        return ok("hooks", f"all {len(targets)} functions that the plugin hooks are there")
    text = f"this SGLang has no {', '.join(missing)}"
    return mend("hooks", text, f"pip install sglang=={_plugin('releases').TESTED[-1]}")


def _has(root: Path, target: str, sources: dict[Path, list[ast.stmt]]) -> bool:
    """Whether SGLang's source has a function or, as a base class may have it, a method."""
    module, _, name = target.rpartition(".")
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if path.exists():
        return name in _names(_source(path, sources))
    module, _, owner = module.rpartition(".")
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in _source(path, sources):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return name in _names(node.body) or bool(node.bases)
    return False


def _names(body: list[ast.stmt]) -> set[str]:
    """Functions that are defined there, or imported."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _source(path: Path, sources: dict[Path, list[ast.stmt]]) -> list[ast.stmt]:
    if path not in sources:
        try:
            sources[path] = ast.parse(path.read_text(encoding="utf-8")).body
        except (OSError, SyntaxError, ValueError):
            sources[path] = []
    return sources[path]


def _plugin(name: str) -> Any:
    """A module of the plugin, which is no dependency and has no types here."""
    from importlib import import_module

    return import_module(f"flashmoa_sglang.{name}")
