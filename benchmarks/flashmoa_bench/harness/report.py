"""Report a benchmark: machine and versions, progress, tables, and results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_type_hints

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa.errors import PluginMissing
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.engines import Engines, Role, connect_engines
from flashmoa_bench.harness.modelled_gpus import (
    SLOWDOWN_OPTION,
    check_keeps_up,
    common_slowdown,
    counted_since,
    device_of,
    read_devices,
    read_server,
)

# Settings of SGLang that explain a result.
SETTINGS = (
    "version",
    "model_path",
    "device",
    "dtype",
    "attention_backend",
    "schedule_policy",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "max_running_requests",
    "max_total_num_tokens",
    "page_size",
    "tp_size",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "enable_cache_report",
)
_PACKAGES = ("flashmoa", "flashmoa-sglang", "sglang", "torch")


class Report:
    """Records one run of a benchmark: prints its head first, and saves its results last.

    It records the machine's load averages (1, 5 and 15 minutes) before and after the run. The later
    averages include the run itself.
    """

    def __init__(self, bench: str, arguments: argparse.Namespace) -> None:
        self.console = terminal()
        self.options = arguments
        self._document: dict[str, Any] = {
            "bench": bench,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "versions": versions(),
            "machine": machine(),
            "load": {"before": os.getloadavg()},
            "settings": {name: _to_json(value) for name, value in vars(arguments).items()},
        }

    @asynccontextmanager
    async def connect(
        self, roles: Sequence[Role], tokens: int, documents: Sequence[Path] = ()
    ) -> AsyncGenerator[Engines]:
        """Connect to the engines, record their settings and print the head.

        Arguments and exceptions are as for :func:`connect_engines`.
        """
        async with connect_engines(roles, self.options, tokens, self.console, documents) as engines:
            self._document["engines"] = {
                name: await _describe(client, engines.notes[name])
                for name, client in engines.clients.items()
            }
            self.print_head()
            with clock.slowed_down(common_slowdown(self._devices)):
                yield engines
            after = await read_devices(engines.clients)
            for name, before in self._devices.items():
                self._document["engines"][name]["modelled_gpu"] = counted_since(before, after[name])

    @property
    def _devices(self) -> dict[str, dict[str, Any]]:
        gpus = {name: each.get("modelled_gpu") for name, each in self.engines.items()}
        return {name: gpu for name, gpu in gpus.items() if gpu}

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the options of the command line, as in the file of ``--json``."""
        return self._document["settings"]

    @property
    def engines(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the recorded settings of the engines, by name."""
        return self._document.get("engines", {})

    def print_head(self) -> None:
        document = self._document
        packages = [f"{name} {value}" for name, value in document["versions"].items() if value]
        hardware = document["machine"]
        parts = [f"{hardware['cpu']}, {hardware['cores']} cores", *hardware["gpus"]]
        lines = [f"$ {shlex.join(document['command'])}", ", ".join(packages), "; ".join(parts)]
        for name, each in self.engines.items():
            device = f" on a {each['modelled_gpu']['name']}" if each["modelled_gpu"] else ""
            lines.append(f"{name}: {each['is']}{device} ({each['url']})")
        if (slowdown := common_slowdown(self._devices)) != 1:
            lines.append(f"All times are the GPU's; this run takes {slowdown:g} times as long.")
        for line in (*lines, ""):
            self.console.print(line, highlight=False, soft_wrap=True)

    def show(
        self, title: str, rows: Sequence[Any], note: str = "", left: Collection[str] = ("",)
    ) -> None:
        """Print the table of :func:`make_table`, and a note that explains its columns."""
        self.console.print(make_table(title, rows, left))
        if note:
            self.console.print(f"{note}\n", highlight=False)

    def save(self, results: dict[str, Any]) -> None:
        """Write everything to the file of ``--json``, if it is given. Results may be dataclasses.

        Raises: EngineError if this machine was too slow for the modelled GPUs. The file is written
            nevertheless, with the number of late forwards.
        """
        self.write(results)
        for name, device in self._devices.items():
            starved = device["starved_seconds"] / max(device["device_seconds"], 1e-9)
            self.console.print(
                f"{name}: the GPU computed for {device['device_seconds']:.1f} s, and waited "
                f"another {starved:.1%} of that for this machine's scheduler."
            )
        if self.options.json is not None:
            self.console.print(f"The same as JSON: {self.options.json}")
        check_keeps_up(self._devices, SLOWDOWN_OPTION)

    def write(self, results: dict[str, Any]) -> None:
        """Write the results so far to the file of ``--json``, if it is given."""
        file: Path | None = self.options.json
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        self._document["load"]["after"] = os.getloadavg()
        document = {**self._document, "results": results}
        scratch = file.with_name(f"{file.name}.partial")
        scratch.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
        scratch.replace(file)


def terminal() -> Console:
    """Return the console for results: the terminal, or a log that is wide enough for all tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 140))


def progress_bar(console: Console) -> Progress:
    """Make a bar that counts rounds and estimates the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


@dataclass(frozen=True, slots=True)
class Column:
    """Declares the column of a table in the annotation of a row's field or property.

    Attributes:
        title: for a mapping, which has a column for each key, with ``{}`` for the key.
        form: format of the value times ``factor``, less ``less``. ``None`` gives an empty cell.
    """

    title: str
    form: str = "{}"
    factor: float = 1
    less: float = 0

    def cell(self, value: Any) -> str:
        if isinstance(value, int | float) and (self.factor, self.less) != (1, 0):
            value = value * self.factor - self.less
        return "" if value is None else self.form.format(value)


def make_table(title: str, rows: Sequence[Any], left: Collection[str] = ("",)) -> Table:
    """Make a table; the rows' class declares its columns by fields and properties.

    Args:
        rows: at least one row.
        left: titles of columns that are aligned to the left.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    cells: list[list[str]] = [[] for _ in rows]
    for name, column in _columns(rows[0]):
        values: list[Any] = [getattr(row, name) for row in rows]
        found = [(column.title, values)]
        if any(isinstance(value, Mapping) for value in values):
            keys = dict.fromkeys(key for value in values for key in value or ())
            found = [
                (column.title.format(key), [value.get(key) if value else None for value in values])
                for key in keys
            ]
        for heading, each in found:
            table.add_column(heading, justify="left" if heading in left else "right")
            for row, value in zip(cells, each, strict=True):
                row.append(column.cell(value))
    for row in cells:
        table.add_row(*row)
    return table


def _columns(row: object) -> Iterator[tuple[str, Column]]:
    """Yield the names of a row's fields and properties that declare columns."""
    kind = type(row)
    hints = get_type_hints(kind, include_extras=True)
    hints |= {
        name: get_type_hints(each.fget, include_extras=True)["return"]
        for name, each in vars(kind).items()
        if isinstance(each, property)
    }
    for name, hint in hints.items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, Column):
                yield name, each


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of our packages; ``None`` if not installed."""
    installed: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return {**installed, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """Return the CPU model, the number of usable cores, and the GPUs' names."""
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
    result = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return result.stdout.strip().splitlines() if result.returncode == 0 else []


async def _describe(client: EngineClient, note: str) -> dict[str, Any]:
    """Return an engine's address, kind and settings that explain a result."""
    try:
        plugin = (await client.info()).plugin.get("version")
    except PluginMissing:
        plugin = None
    server = await read_server(client.url)
    return {
        "url": client.url,
        "is": note,
        "plugin": plugin,
        "modelled_gpu": device_of(server),
        **{name: _to_json(server[name]) for name in SETTINGS if name in server},
    }


def _to_json(value: Any) -> Any:
    """Make a value fit for JSON. Paths become relative to the working folder, or to home."""
    if not isinstance(value, Path | str):
        return value
    text = str(value).removeprefix(f"{Path.cwd()}/")
    home = f"{Path.home()}/"
    return f"~/{text.removeprefix(home)}" if text.startswith(home) else text
