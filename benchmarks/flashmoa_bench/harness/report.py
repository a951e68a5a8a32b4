"""What a benchmark says of itself: on what it ran, its progress, its results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flashmoa.engine import PluginMissing
from flashmoa_bench.harness.engines import Engines

# Of SGLang's own, what explains a result.
_SETTINGS = (
    "version",
    "model_path",
    "device",
    "dtype",
    "attention_backend",
    "schedule_policy",
    "chunked_prefill_size",
    "max_running_requests",
    "max_total_num_tokens",
    "page_size",
    "tp_size",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "enable_cache_report",
)
_LOG_WIDTH = 140
_PACKAGES = ("flashmoa", "flashmoa-sglang", "sglang", "torch")


class Report:
    """One run of a benchmark: its head, printed first, and its results, saved last.

    The machine's load averages (1, 5 and 15 minutes) are recorded at both: the run itself is in the
    second.

    Args:
        bench: the benchmark's name. arguments: as parsed; recorded as they are.
    """

    def __init__(self, bench: str, arguments: argparse.Namespace) -> None:
        self._json: Path | None = arguments.json
        self._document: dict[str, Any] = {
            "bench": bench,
            "command": command(),
            "versions": versions(),
            "machine": machine(),
            "load": {"before": os.getloadavg()},
            "settings": {name: _plain(value) for name, value in vars(arguments).items()},
        }

    async def describe(self, engines: Engines) -> dict[str, Any]:
        """Record what the engines say of themselves. Returns: that, by their names."""
        described: dict[str, Any] = {}
        for name, client in engines.clients.items():
            described[name] = {"url": client.url, "is": engines.notes[name], "plugin": None}
            described[name] |= await _settings(client.url)
            with contextlib.suppress(PluginMissing):
                described[name]["plugin"] = (await client.info()).plugin.get("version")
        self._document["engines"] = described
        return described

    def head(self, console: Console) -> None:
        """Print command, versions and machine."""
        document = self._document
        console.print(f"$ {shlex.join(document['command'])}", highlight=False, soft_wrap=True)
        known = [f"{name} {value}" for name, value in document["versions"].items() if value]
        console.print(", ".join(known), highlight=False, soft_wrap=True)
        facts = document["machine"]
        parts = [f"{facts['cpu']}, {facts['cores']} cores", *facts["gpus"]]
        console.print("; ".join(parts), highlight=False, soft_wrap=True)
        for name, engine in document.get("engines", {}).items():
            line = f"{name}: {engine['is']} ({engine['url']})"
            console.print(line, highlight=False, soft_wrap=True)
        console.print()

    def save(self, console: Console, results: dict[str, Any]) -> None:
        """Write everything to the file of ``--json``, if there is one."""
        if self._json is None:
            return
        self._json.parent.mkdir(parents=True, exist_ok=True)
        self._document["load"]["after"] = os.getloadavg()
        document = {**self._document, "results": results}
        self._json.write_text(json.dumps(document, indent=2) + "\n")
        console.print(f"The same as JSON: {self._json}")


def terminal() -> Console:
    """Return where results are printed: the terminal, or a log wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _LOG_WIDTH))


def progress(console: Console) -> Progress:
    """Make a bar that counts rounds and says how long the rest will take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def command() -> list[str]:
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def versions() -> dict[str, str | None]:
    """Return the versions of what is installed here; ``None`` for what is not."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return {**found, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """Return the CPU model, the cores this process may use, and GPU names."""
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return asked.stdout.strip().splitlines() if asked.returncode == 0 else []


async def _settings(url: str) -> dict[str, Any]:
    """Return the settings that matter here, of those that an engine reports."""
    async with httpx.AsyncClient(timeout=60) as http:
        try:
            answer = await http.get(f"{url}/server_info")
            told: dict[str, Any] = answer.json() if answer.is_success else {}
        except (httpx.TransportError, ValueError):
            told = {}
    return {name: _plain(told[name]) for name in _SETTINGS if name in told}


def _plain(value: Any) -> Any:
    """Make a value fit for JSON; a path below the working folder is made relative to it."""
    here = f"{Path.cwd()}/"
    return str(value).removeprefix(here) if isinstance(value, Path | str) else value
