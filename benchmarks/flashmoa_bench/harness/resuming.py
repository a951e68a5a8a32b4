"""Measure cells that an earlier run has not measured, and write all of them after each."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashmoa.engine import EngineError
from flashmoa_bench.harness.report import Report, progress_bar

# Identifies a cell, and names it on the progress bar.
Key = tuple[str, int]


def measured_cells(
    file: Path, settings: Mapping[str, Any], free: Collection[str]
) -> list[dict[str, Any]]:
    """Return the cells in the JSON file of an earlier run; none if there is no file.

    Args:
        settings: this run's options, as the file has them.
        free: options that may differ between the two runs.

    Raises: EngineError if the file is of a run with other options, or none of this benchmark.
    """
    if not file.exists():
        return []
    document = json.loads(file.read_text())
    try:
        earlier, cells = document["settings"], document["results"]["cells"]
    except (KeyError, TypeError) as error:
        raise EngineError(f"--resume: {file} holds no cells of this benchmark") from error
    names = (earlier.keys() | settings.keys()) - set(free)
    if other := sorted(name for name in names if earlier.get(name) != settings.get(name)):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        raise EngineError(f"--resume: {file} is of a run with other {options}: give another --json")
    return cells


async def measure_cells(
    todo: Mapping[Key, Callable[[], Awaitable[Any]]], found: dict[Key, Any], report: Report
) -> None:
    """Measure cells one after the other, and write all that are found after each.

    Args:
        todo: what measures each cell, in their order. A cell is a dataclass.
        found: the cells so far.
    """
    with progress_bar(report.console) as bars:
        bar = bars.add_task("", total=len(todo))
        for key, measure in todo.items():
            way, number = key
            bars.update(bar, description=f"{way}, number {number}")
            found[key] = await measure()
            report.write(to_results(list(found.values())))
            bars.advance(bar)


def to_results(cells: Sequence[Any]) -> dict[str, Any]:
    """Return the cells in the form in which :func:`measured_cells` reads them."""
    return {"cells": [asdict(cell) for cell in cells]}
