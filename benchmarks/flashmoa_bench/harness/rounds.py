"""Play rounds of measurements in turns, and compute statistics of small samples."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar

import anyio
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from flashmoa.errors import EngineError
from flashmoa_bench.harness.modelled_gpus import TOLERATED_SHARE
from flashmoa_bench.harness.report import Report, progress_bar

# Identifies a cell, and names it on the progress bar.
Key = tuple[str, int]
Cell = TypeVar("Cell")


def measured_cells(report: Report, kind: type[Cell], free: Collection[str]) -> list[Cell]:
    """Return the cells in the file of ``--json`` if ``--resume`` is given, else none.

    Cells that overran a modelled GPU's time are left out, so that they are measured again.

    Args:
        kind: the cells' dataclass.
        free: options that may differ between the earlier run and this run.

    Raises: EngineError if the file has no cells of this kind, or other options differ.
    """
    file, settings = report.options.json, report.settings
    if not report.options.resume or not file.exists():
        return []
    document = json.loads(file.read_text())
    adapter: TypeAdapter[Cell] = TypeAdapter(kind)
    try:
        earlier = document["settings"]
        cells = [adapter.validate_python(each) for each in document["results"]["cells"]]
    except (KeyError, TypeError, ValidationError) as error:
        raise EngineError(f"--resume: {file} holds no cells of this benchmark") from error
    names = (earlier.keys() | settings.keys()) - set(free) - {"json", "resume"}
    if other := sorted(name for name in names if earlier.get(name) != settings.get(name)):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        raise EngineError(f"--resume: {file} is of a run with other {options}: give another --json")
    return [cell for cell in cells if getattr(cell, "overrun", 0.0) <= TOLERATED_SHARE]


async def measure_cells(
    todo: Mapping[Key, Callable[[], Awaitable[Any]]], found: dict[Key, Any], report: Report
) -> None:
    """Measure cells one after another, and write all found cells after each.

    Args:
        todo: functions that measure the missing cells, in their order.
        found: the cells so far.
    """
    with progress_bar(report.console) as bars:
        bar = bars.add_task("", total=len(todo))
        for key, measure in todo.items():
            way, number = key
            bars.update(bar, description=f"{way}, number {number}")
            found[key] = await measure()
            report.write({"cells": list(found.values())})
            bars.advance(bar)


Way = TypeVar("Way", bound=str | int)
Item = TypeVar("Item")
Result = TypeVar("Result")


class RoundPlayer:
    """Plays several ways in turn, and shows a bar with the remaining rounds within its context.

    Args:
        repeats: number of rounds of each way.
        ways: number of ways in all calls of :meth:`play` together.
    """

    def __init__(self, console: Console, repeats: int, ways: int) -> None:
        self._repeats = repeats
        self._bars = progress_bar(console)
        self._bar = self._bars.add_task("warming up", total=repeats * ways)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._bars.stop()

    async def play(
        self,
        ways: Sequence[Way],
        run: Callable[[Way], Awaitable[Result]],
        label: str = "",
        *,
        warm_up: bool = True,
    ) -> dict[Way, list[Result]]:
        """Call ``run`` for each way in turn, round after round; return its results by way.

        Args:
            label: stands before the way's name on the bar.
            warm_up: whether to play a first round that does not count, since an engine's first
                requests take longer.
        """
        for way in ways if warm_up else ():
            await run(way)
        results: dict[Way, list[Result]] = {way: [] for way in ways}
        for way in alternate(self._repeats, ways):
            self._bars.update(self._bar, description=f"{label} {way}".strip())
            results[way].append(await run(way))
            self._bars.advance(self._bar)
        return results


def alternate(repeats: int, ways: Sequence[Way]) -> list[Way]:
    """Return each way ``repeats`` times; every round starts with a different way.

    So a machine that becomes faster or slower during a run affects all ways alike.
    """
    return [ways[(start + i) % len(ways)] for start in range(repeats) for i in range(len(ways))]


async def run_concurrently(
    run: Callable[[Item], Awaitable[Result]], items: Sequence[Item], limit: int | None = None
) -> list[Result]:
    """Run all items, at most ``limit`` at a time; return the results in the items' order."""
    results: dict[int, Result] = {}
    waiting = iter(enumerate(items))

    async def work() -> None:
        for place, item in waiting:
            results[place] = await run(item)

    async with anyio.create_task_group() as group:
        for _ in range(limit or len(items)):
            group.start_soon(work)
    return [results[place] for place in range(len(items))]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a ``share`` (0 to 1) of ``values`` do not exceed, by nearest rank.

    Raises: ValueError without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
