"""Run AutoGen's own tests with the stock model client, and with ours in its place.

Fetches the source distributions of the installed AutoGen, runs its tests unchanged and then with
the import replaced, and fails if a test passes with the stock client only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parents[2] / ".cache" / "conformance"
# Packages that AutoGen's tests import, and that FlashMoA does not need.
EXTRAS = ("anthropic<1", "mcp<2", "ollama")
# Tests that fail with our client on purpose, and its different behaviour.
INTENDED = {
    "test_openai_chat_completion_client_raise_on_unknown_model": "any model has a model_info",
    "test_custom_model_with_capabilities": "any model has a model_info",
    "test_openai_chat_completion_client_create_stream_no_usage_default": "streams say their usage",
    "test_chat_completion_context_declarative": "it is another provider",
}
STOCK = "OpenAIChatCompletionClient"
OURS = "FlashMoAChatCompletionClient"
SUITES = {
    "autogen-ext": ("models/test_openai_model_client.py", "models/test_chat_completion_cache.py"),
    "autogen-agentchat": (
        "test_assistant_agent.py",
        "test_group_chat.py",
        "test_group_chat_graph.py",
        "test_group_chat_nested.py",
        "test_magentic_one_group_chat.py",
        "test_society_of_mind_agent.py",
        "test_streaming_message_id_correlation.py",
        "test_declarative_components.py",
    ),
    "autogen-core": ("test_model_context.py",),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Names of tests by their outcome."""

    passed: frozenset[str]
    failed: frozenset[str]
    skipped: frozenset[str]


def main() -> int:
    HERE.mkdir(parents=True, exist_ok=True)
    site = HERE / "site"
    if not site.exists():
        _pip("install", "--target", str(site), *EXTRAS)
    worse: list[str] = []
    for package, files in SUITES.items():
        sources = _sources(package)
        stock, ours = (_run(sources, files, swap) for swap in (False, True))
        both = len(stock.failed & ours.failed)
        print(
            f"{package} {version(package)}: {len(ours.passed)} passed, "
            f"{len(ours.failed)} failed ({both} with the stock client, too), "
            f"{len(ours.skipped)} skipped; stock: {len(stock.passed)} passed"
        )
        worse += sorted(stock.passed - ours.passed)
    meant = [name for name in worse if name.rpartition("::")[2] in INTENDED]
    for name in meant:
        print(f"  on purpose: {name}: {INTENDED[name.rpartition('::')[2]]}")
    worse = [name for name in worse if name not in meant]
    for name in worse:
        print(f"  passes with the stock client only: {name}")
    return 1 if worse else 0


def _pip(*arguments: str) -> None:
    quiet = ("--disable-pip-version-check", "--quiet", "--no-warn-conflicts")
    flags = quiet if arguments[0] == "install" else quiet[:2]
    subprocess.run([sys.executable, "-m", "pip", arguments[0], *flags, *arguments[1:]], check=True)


def _sources(package: str) -> Path:
    """Return the folder of a package's published sources."""
    name = f"{package.replace('-', '_')}-{version(package)}"
    archive = HERE / f"{name}.tar.gz"
    if not archive.exists():
        wanted = f"{package}=={version(package)}"
        _pip("download", "--no-deps", "--no-binary", package, "--dest", str(HERE), wanted)
    if not (HERE / name).exists():
        with tarfile.open(archive) as sources:
            sources.extractall(HERE, filter="data")
    return HERE / name


def _run(sources: Path, files: tuple[str, ...], swap: bool) -> Outcome:
    """Run test files of a copy of ``sources``, with or without our client."""
    copy = HERE / ("ours" if swap else "stock") / sources.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sources, copy)
    if swap:
        for file in copy.glob("tests/**/*.py"):
            file.write_text(_swap_client(file.read_text()))
    report = copy / "report.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), os.environ.get("PYTHONPATH", "")]),
        # No request may leave this machine.
        "OPENAI_API_KEY": "",
        "AUTOGEN_ALLOWED_PROVIDER_NAMESPACES": "flashmoa",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", f"--rootdir={copy}", f"--junitxml={report}"]
    command += [f"tests/{file}" for file in files]
    with (copy / "log.txt").open("w") as log:
        subprocess.run(command, cwd=copy, env=environment, stdout=log, stderr=log, check=False)
    return _read_report(report)


def _swap_client(text: str) -> str:
    """Replace the import of the stock client by ours, and keep other imports of the same line."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("from autogen_ext.models.openai import") and STOCK in line:
            names = [name.strip() for name in line.split("import", 1)[1].split(",")]
            rest = [name for name in names if name != STOCK]
            if rest:
                lines.append(f"from autogen_ext.models.openai import {', '.join(rest)}")
            lines.append(f"from flashmoa.autogen import {OURS} as {STOCK}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _read_report(report: Path) -> Outcome:
    """Read the outcomes of a run from pytest's report."""
    names: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            names["failed"].add(name)
        else:
            names["skipped" if "skipped" in kinds else "passed"].add(name)
    return Outcome(*(frozenset(names[kind]) for kind in ("passed", "failed", "skipped")))


if __name__ == "__main__":
    sys.exit(main())
