"""The handoff of FlashAgents §6.1 (Figure 6), over a grid of workloads.

C pipelines at once: a known prefix shared by the C, an upstream agent's tokens arriving at
so many per second, a suffix of 10 tokens, and the downstream's first token. T is the time
from A's first token to B's (Eq. 6): sequential on stock SGLang with its fcfs policy and with
lpm, and linked on FlashMoA.

By default the upstream agents are clocks, so that one engine suffices. With --upstream-decodes
they really decode, on an engine of their own, and a third way is measured: what a client can do
with any server, by stateless prefill requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import anyio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Role, connected
from flashmoa_bench.harness.report import Report, terminal
from flashmoa_bench.linking import decoding_upstream, heatmap
from flashmoa_bench.linking.overlap import LINKED, GridSummary, HandoffCell, cell, summarise
from flashmoa_bench.linking.pipelines import Ways, Workload, play_grid

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
# TPS, prefix, upstream.
_Grid = tuple[list[float], list[int], list[int]]
_DEFAULT: _Grid = ([50.0, 100.0], [256, 512, 1024], [64])
_CONCURRENCY = [1, 2, 4, 8]
_FULL: _Grid = ([40.0, 80.0, 160.0], [256, 512, 1024, 2048], [32, 64, 96, 128, 192])


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench handoff``; return the exit status."""
    parser = command_line("handoff", __doc__, ROLES)
    grid = parser.add_argument_group("the grid; 24 cells unless said otherwise")
    grid.add_argument("--full", action="store_true", help="240 cells")
    grid.add_argument("--tps", type=float, nargs="+", help="upstream tokens per second")
    grid.add_argument("--prefix", type=positive, nargs="+", help="tokens known beforehand")
    grid.add_argument("--upstream", type=positive, nargs="+", help="tokens the upstream writes")
    grid.add_argument("--concurrency", type=positive, nargs="+", help="pipelines at once")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="a heat map")
    decoding_upstream.add_options(parser)
    chosen = parser.parse_args(arguments)
    if chosen.upstream_decodes:
        decoding_upstream.check_options(parser, chosen)
        anyio.run(decoding_upstream.measure, chosen)
        return 0
    if chosen.picture and chosen.picture.suffix != ".svg":
        parser.error("--picture writes SVG; give a name that ends in .svg")
    if chosen.tps and min(chosen.tps) <= 0:
        parser.error("--tps must be above 0")
    anyio.run(_main, chosen)
    return 0


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Return the grid: what is not given is the default's or, with ``--full``, the large one's."""
    all_tps, prefixes, upstreams = _FULL if arguments.full else _DEFAULT
    return [
        Workload(tps, prefix, upstream, concurrency)
        for tps in arguments.tps or all_tps
        for prefix in arguments.prefix or prefixes
        for upstream in arguments.upstream or upstreams
        for concurrency in arguments.concurrency or _CONCURRENCY
    ]


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    grid = workloads(arguments)
    report = Report("handoff", arguments)
    pool = max(workload.pool_tokens for workload in grid)
    async with connected(ROLES, arguments, pool, console) as engines:
        await report.describe(engines)
        report.head(console)
        ways = {name: way for name, way in _WAYS.items() if way[0] in engines}
        rounds = await play_grid(engines, grid, ways, arguments, console)
    cells = [cell(workload, played) for workload, played in zip(grid, rounds, strict=True)]
    show(cells, console)
    if arguments.picture:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        arguments.picture.write_text(heatmap.draw(cells, "Speed-up: T sequential / T linked"))
        console.print(f"Heat map: {arguments.picture}")
    report.save(
        console,
        {"cells": [asdict(one) for one in cells], "summary": asdict(summarise(cells))},
    )


def show(cells: Sequence[HandoffCell], console: Console) -> None:
    """Print the table and what it comes to."""
    console.print(_table(cells))
    console.print(
        "T: from A's first token to B's (Eq. 6). bound: min(T_A, P_B - floor), P_B what the "
        "better baseline adds to T_A, the floor B's first token when all that was known before A's "
        "last token is cached. "
        "hidden: T of the better baseline - T linked. late: prompt tokens left when B's request "
        "came.\n"
    )
    _show_summary(summarise(cells), console)


def _table(cells: Sequence[HandoffCell]) -> Table:
    title = "Handoff: TPS/Prefix/Upstream, seconds"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    ways = list(cells[0].speedup)
    names = ["workload", "C", *(f"T {way}" for way in ways), "T linked"]
    names += [f"vs {way}" for way in ways]
    for name in (*names, "T_A", "P_B", "floor", "bound", "hidden", "fraction", "late"):
        table.add_column(name, justify="right")
    for one in cells:
        fraction = one.hidden_fraction
        times = (one.decode, one.prefill, one.floor, one.bound, one.hidden)
        table.add_row(
            one.workload.label,
            str(one.workload.concurrency),
            *(f"{one.seconds[way]:.2f}" for way in (*ways, LINKED)),
            *(f"{one.speedup[way]:.2f}x" for way in ways),
            *(f"{value:.2f}" for value in times),
            f"{fraction:.2f}" if fraction is not None and one.is_worth_hiding else "-",
            f"{one.late_tokens:.0f}",
        )
    return table


def _show_summary(summary: GridSummary, console: Console) -> None:
    for way, won in summary.won.items():
        least, middle, most = summary.speedups[way]
        console.print(
            f"vs {way}: {won} of {summary.cells} cells won; speed-up {least:.2f}x to {most:.2f}x, "
            f"median {middle:.2f}x"
        )
    console.print(
        f"hidden fraction >= 0.95 in {summary.well_hidden} of {summary.worth_hiding} cells whose "
        "bound is above 10 % of T"
    )
