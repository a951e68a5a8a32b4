"""Measure the handoff of FlashAgents §6.1 (Figure 6), over a grid of workloads.

C pipelines run at once. In each, agent A writes tokens at a set rate, and agent B answers a prompt:
a known prefix (shared by the C pipelines), A's tokens and a suffix of 10 tokens. T is the time from
A's first token to B's first token (Eq. 6). It is measured sequentially on stock SGLang, with its
scheduling policies fcfs and lpm, and linked on FlashMoA. The agents A are clocks, so one engine is
enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

from flashmoa_bench.harness.command_line import (
    RESUME,
    Option,
    command,
    positive,
    positive_float,
)
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import measured_cells
from flashmoa_bench.link.pipelines import PipelineRound, Ways, Workload, play_grid

LINKED = "linked"


@dataclass(frozen=True, slots=True)
class HandoffCell:
    """One workload's figures (docs/benchmarks.md); medians over rounds, in seconds.

    Attributes:
        seconds, speedup: T by way, and T of each baseline over T linked.
        hidden_fraction: ``hidden`` over ``bound``; ``None`` unless the bound is above 0.
        overrun: delay of forwards over a modelled GPU's time.
    """

    workload: Annotated[Workload, Column("workload")]
    seconds: Annotated[Mapping[str, float], Column("T {}", "{:.2f}")]
    speedup: Annotated[Mapping[str, float], Column("vs {}", "{:.2f}x")]
    decode: Annotated[float, Column("T_A", "{:.2f}")]
    prefill: Annotated[float, Column("P_B", "{:.2f}")]
    floor: Annotated[float, Column("floor", "{:.2f}")]
    bound: Annotated[float, Column("bound", "{:.2f}")]
    hidden: Annotated[float, Column("hidden", "{:.2f}")]
    hidden_fraction: float | None
    late_tokens: Annotated[float, Column("late", "{:.0f}")]
    overrun: float = 0.0

    @property
    def sequential(self) -> float:
        return min(value for way, value in self.seconds.items() if way != LINKED)

    @property
    def worthy_fraction(self) -> Annotated[float | None, Column("fraction", "{:.2f}")]:
        """Return the hidden fraction of a cell that is worth hiding, else ``None``."""
        return self.hidden_fraction if self.is_worth_hiding else None

    @property
    def is_worth_hiding(self) -> bool:
        """Return whether there is enough to hide to tell how well it is hidden."""
        return self.bound > 0.1 * self.sequential


def summarise_cell(
    workload: Workload, rounds: Mapping[str, Sequence[PipelineRound]], overrun: float = 0.0
) -> HandoffCell:
    seconds = {way: median(each.seconds for each in group) for way, group in rounds.items()}
    linked = seconds[LINKED]
    sequential = min(value for way, value in seconds.items() if way != LINKED)
    floor = median(each.floor or 0.0 for each in rounds[LINKED])
    decode = workload.decode_seconds
    prefill = sequential - decode
    bound = min(decode, prefill - floor)
    hidden = sequential - linked
    return HandoffCell(
        workload=workload,
        seconds=seconds,
        speedup={way: value / linked for way, value in seconds.items() if way != LINKED},
        decode=decode,
        prefill=prefill,
        floor=floor,
        bound=bound,
        hidden=hidden,
        hidden_fraction=hidden / bound if bound > 0 else None,
        late_tokens=median(each.late_tokens for each in rounds[LINKED]),
        overrun=overrun,
    )


@dataclass(frozen=True, slots=True)
class GridSummary:
    """The figures of all cells of a grid; by baseline, the cells won and the range of speed-ups."""

    cells: int
    won: Mapping[str, int]
    speedups: Mapping[str, tuple[float, float, float]]
    worth_hiding: int
    well_hidden: int


def summarise_grid(cells: Sequence[HandoffCell]) -> GridSummary:
    by_way = {way: [cell.speedup[way] for cell in cells] for way in cells[0].speedup}
    worth = [cell for cell in cells if cell.is_worth_hiding]
    return GridSummary(
        cells=len(cells),
        won={way: sum(value >= 1 for value in values) for way, values in by_way.items()},
        speedups={
            way: (min(values), median(values), max(values)) for way, values in by_way.items()
        },
        worth_hiding=len(worth),
        well_hidden=sum((cell.hidden_fraction or 0) >= 0.95 for cell in worth),
    )


ROLES = (
    Role("stock", plugin=False, arguments=("--schedule-policy", "fcfs")),
    Role("lpm", plugin=False, arguments=("--schedule-policy", "lpm"), optional=True),
    Role("flashmoa", plugin=True),
)
_WAYS: Ways = {
    "fcfs": ("stock", "sequential"),
    "lpm": ("lpm", "sequential"),
    LINKED: ("flashmoa", "linked"),
}
# A's tokens per second, the prefix's tokens, the tokens that A writes, and the number of pipelines,
# by whether the grid is the full one.
_GRIDS: dict[bool, tuple[list[float], list[int], list[int], list[int]]] = {
    False: ([50.0, 100.0], [256, 512, 1024], [64], [1, 2, 4, 8]),
    True: (
        [25.0, 50.0, 100.0],
        [1000, 4000, 8000, 16_000],
        [32, 64, 128, 256, 400],
        [1, 2, 4, 8],
    ),
}
# Options that may differ between a run and the run that it resumes.
_FREE_OPTIONS = ("repeats", "tps", "prefix", "upstream", "concurrency")


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Return the grid's workloads; the default or the full grid has the dimensions not given."""
    all_tps, prefixes, upstreams, counts = _GRIDS[arguments.full]
    return [
        Workload(tps, prefix, upstream, concurrency)
        for tps in arguments.tps or all_tps
        for prefix in arguments.prefix or prefixes
        for upstream in arguments.upstream or upstreams
        for concurrency in arguments.concurrency or counts
    ]


async def _measure(report: Report) -> None:
    options = report.options
    grid = workloads(options)
    measured = measured_cells(report, HandoffCell, _FREE_OPTIONS)
    found = {cell.workload: cell for cell in measured}
    if todo := [workload for workload in grid if workload not in found]:
        names = [*options.policies, LINKED]
        roles = [role for role in ROLES if role.name in {_WAYS[name][0] for name in names}]
        async with report.connect(roles, max(each.pool_tokens for each in todo)) as engines:
            # Without its optional engine, a way is left out.
            ways: Ways = {name: _WAYS[name] for name in names if _WAYS[name][0] in engines}
            played = play_grid(engines, todo, ways, options.repeats, options.seed, report.console)
            async for workload, rounds, overrun in played:
                found[workload] = summarise_cell(workload, rounds, overrun)
                report.write(_to_results(list(found.values())))
    show([found[workload] for workload in grid], report)
    if todo:
        report.save(_to_results(list(found.values())))


def _to_results(cells: Sequence[HandoffCell]) -> dict[str, Any]:
    return {"cells": cells, "summary": summarise_grid(cells)}


def show(cells: Sequence[HandoffCell], report: Report) -> None:
    report.show(
        "Handoff, in seconds; workload: tokens per second/prefix/upstream tokens/pipelines",
        cells,
        "T: from A's first token to B's (Eq. 6). T_A: A's decode time. P_B: T of the better "
        "baseline - T_A. floor: B's time to first token when everything known before A's last "
        "token is cached. bound: min(T_A, P_B - floor), the most that can be hidden. hidden: "
        "T of the better baseline - T linked. fraction: hidden over bound. late: prompt tokens "
        "left to compute when B's request came.",
    )
    summary = summarise_grid(cells)
    for way, won in summary.won.items():
        least, middle, most = summary.speedups[way]
        report.console.print(
            f"vs {way}: {won} of {summary.cells} cells won; speed-up {least:.2f}x to {most:.2f}x, "
            f"median {middle:.2f}x"
        )
    report.console.print(
        f"hidden fraction >= 0.95 in {summary.well_hidden} of {summary.worth_hiding} cells whose "
        "bound is above 10 % of T"
    )


main = command(
    "handoff",
    __doc__,
    _measure,
    ROLES,
    Option("--full", bool, about="measure the grid of 240 cells, not of 24"),
    Option("--tps", positive_float, about="upstream tokens per second", count="+"),
    Option("--prefix", positive, about="tokens known beforehand", count="+"),
    Option("--upstream", positive, about="tokens the upstream writes", count="+"),
    Option("--concurrency", positive, about="pipelines at once", count="+"),
    Option("--policies", str, ["fcfs", "lpm"], "of stock SGLang", choices=("fcfs", "lpm")),
    RESUME,
)
