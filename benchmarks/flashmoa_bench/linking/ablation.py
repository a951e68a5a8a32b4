"""What streaming and the intra-turn cache each contribute (FlashAgents §6.4, Table 1).

Pipelines as in bench handoff, at one pace: sequential on stock SGLang (the pipelines' requests
one by one, and as one batch), linked on FlashMoA without its intra-turn cache, and linked on
FlashMoA as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Role, connected
from flashmoa_bench.harness.report import Report, terminal
from flashmoa_bench.linking.pipelines import PipelineRound, Ways, Workload, play_grid

# What SGLang takes on the paper's GPU; it takes less on a CPU. It decides how many prompts stock
# SGLang starts at once, and so how often it computes what they share.
_CHUNK = ("--chunked-prefill-size", "8192")
ROLES = (
    Role("stock", plugin=False, arguments=("--schedule-policy", "fcfs", *_CHUNK)),
    Role("streaming", plugin=True, arguments=("--flashmoa-intra-turn", "off", *_CHUNK)),
    Role("flashmoa", plugin=True, arguments=_CHUNK),
)
_VARIANTS: Ways = {
    "baseline": ("stock", "sequential"),
    "batched": ("stock", "batch"),
    "streaming": ("streaming", "linked"),
    "full": ("flashmoa", "linked"),
}
# The paper's pace, and the tokens that its floor of some 4 s amounts to.
_TPS, _UPSTREAM = 50.0, 200
# Table 1 by prefix and pipelines, Qwen3-32B on one A100: seconds, as it calls its variants.
_COLUMNS = ("baseline", "streaming", "full")
PAPER: dict[tuple[int, int], tuple[float, float, float]] = {
    (1000, 1): (4.46, 4.16, 4.11),
    (1000, 8): (6.93, 4.11, 4.11),
    (2000, 1): (4.77, 4.15, 4.11),
    (2000, 8): (10.10, 5.32, 4.20),
}


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One row of Table 1; by variant, medians over rounds.

    Attributes:
        seconds: T of Eq. 6.
        duplicates: prompt tokens computed over unique prompt tokens; 1 is none twice.
        floor: what no overlap can hide, on the full variant; as in bench handoff.
        speedup: over the baseline and over the batched one, of the full variant.
        paper: the paper's seconds by variant, where it has this row.
    """

    prefix: int
    pipelines: int
    decode: float
    floor: float
    seconds: Mapping[str, float]
    duplicates: Mapping[str, float]
    speedup: Mapping[str, float]
    paper: Mapping[str, float] | None


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench ablation``; return the exit status."""
    parser = command_line("ablation", __doc__, ROLES)
    parser.add_argument("--prefix", type=positive, nargs="+", default=[1000, 2000])
    parser.add_argument("--pipelines", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--tps", type=float, default=_TPS, help="upstream tokens per second")
    parser.add_argument("--upstream", type=positive, default=_UPSTREAM, help="upstream tokens")
    chosen = parser.parse_args(arguments)
    if chosen.tps <= 0:
        parser.error("--tps must be above 0")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    grid = [
        Workload(arguments.tps, prefix, arguments.upstream, pipelines)
        for prefix, pipelines in product(arguments.prefix, arguments.pipelines)
    ]
    report = Report("ablation", arguments)
    pool = max(workload.pool_tokens for workload in grid)
    async with connected(ROLES, arguments, pool, console) as engines:
        await report.describe(engines)
        report.head(console)
        rounds = await play_grid(engines, grid, _VARIANTS, arguments, console)
    rows = [row(workload, played) for workload, played in zip(grid, rounds, strict=True)]
    show(rows, console)
    report.save(console, {"rows": [asdict(row) for row in rows]})


def row(workload: Workload, rounds: Mapping[str, Sequence[PipelineRound]]) -> AblationRow:
    """Summarise the rounds of one workload; ``rounds`` are by variant."""
    seconds = {name: median(one.seconds for one in group) for name, group in rounds.items()}
    unique = workload.unique_tokens
    return AblationRow(
        prefix=workload.prefix,
        pipelines=workload.concurrency,
        decode=workload.decode_seconds,
        floor=median(one.floor or 0.0 for one in rounds["full"]),
        seconds=seconds,
        duplicates={
            name: median(one.computed_tokens for one in group) / unique
            for name, group in rounds.items()
        },
        speedup={name: seconds[name] / seconds["full"] for name in ("baseline", "batched")},
        paper=_paper(workload),
    )


def _paper(workload: Workload) -> dict[str, float] | None:
    if (workload.tps, workload.upstream) != (_TPS, _UPSTREAM):
        return None
    seconds = PAPER.get((workload.prefix, workload.concurrency))
    return dict(zip(_COLUMNS, seconds, strict=True)) if seconds else None


def show(rows: Sequence[AblationRow], console: Console) -> None:
    """Print the table beside the paper's numbers."""
    table = Table(title="Ablation: T in seconds, here | paper", title_justify="left")
    names = ("prefix", "pipelines", *_VARIANTS, "T_A + floor")
    for name in (*names, "baseline/full", "batched/full"):
        table.add_column(name, justify="right")
    for one in rows:
        paper = one.paper or {}
        theirs = paper["baseline"] / paper["full"] if paper else None
        table.add_row(
            str(one.prefix),
            str(one.pipelines),
            *(_beside(one.seconds[name], paper.get(name)) for name in _VARIANTS),
            f"{one.decode + one.floor:.2f}",
            _beside(one.speedup["baseline"], theirs, "x"),
            _beside(one.speedup["batched"], theirs, "x"),
        )
    console.print(table)
    console.print(
        "baseline: stock, each pipeline's request by itself; batched: all of them as one; "
        "streaming: linked, intra-turn cache off; full: as it is. T_A + floor: the least any "
        "overlap can reach. paper: Qwen3-32B on one A100.\n"
    )
    console.print(_duplicates(rows))


def _duplicates(rows: Sequence[AblationRow]) -> Table:
    title = "Prompt tokens computed over unique ones (each shared one counted once)"
    table = Table(title=title, title_justify="left")
    for name in ("prefix", "pipelines", *_VARIANTS):
        table.add_column(name, justify="right")
    for one in rows:
        ratios = (f"{one.duplicates[name]:.2f}" for name in _VARIANTS)
        table.add_row(str(one.prefix), str(one.pipelines), *ratios)
    return table


def _beside(ours: float, theirs: float | None, unit: str = "") -> str:
    return f"{ours:.2f}{unit}" + (f" | {theirs:.2f}{unit}" if theirs is not None else "")
