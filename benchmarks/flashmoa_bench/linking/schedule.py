"""Streaming and shortest-job-first together (FlashAgents §6.6, Figure 9).

Workflows of three agents whose lengths are known, all on one engine that runs few requests
at a time, so that there is a queue: stock SGLang in order of arrival, FlashMoA's
shortest-job-first, its links, and both. Workflow latency over that of stock FCFS.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.rounds import alternating, percentile
from flashmoa_bench.linking.jobs import KINDS, Workflow, play, pool_tokens, workflows

ROLES = (
    Role("stock", plugin=False, arguments=("--schedule-policy", "fcfs")),
    Role("flashmoa", plugin=True, arguments=("--flashmoa-schedule", "sglang")),
    Role("sjf", plugin=True, arguments=("--flashmoa-schedule", "sjf")),
)
FCFS = "fcfs"
# By way: the engine's role, and whether its agents are linked.
_WAYS = {
    FCFS: ("stock", False),
    "sjf": ("sjf", False),
    "linked": ("flashmoa", True),
    "linked + sjf": ("sjf", True),
}
# Figure 9, of FCFS; the text gives one figure for both concurrencies except for the last.
PAPER = {
    "sjf": {1: "0.65-0.70", 10: "0.65-0.70"},
    "linked": {1: "0.57", 10: "0.57"},
    "linked + sjf": {1: "0.44", 10: "0.63"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one concurrency; workflow latency in seconds.

    Attributes:
        mean: median over rounds of the mean over workflows.
        p95: over the workflows of all rounds.
        mean_of_fcfs, p95_of_fcfs: over those of stock FCFS at this concurrency.
    """

    way: str
    concurrency: int
    mean: float
    p95: float
    mean_of_fcfs: float
    p95_of_fcfs: float


def main(arguments: Sequence[str]) -> int:
    """``flashmoa bench schedule``; returns the exit status."""
    parser = command_line("schedule", __doc__, ROLES)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 10])
    parser.add_argument(
        "--max-running-requests", type=positive, default=4, help="of engines started here"
    )
    parser.add_argument(
        "--prefixes",
        choices=("shared", "own"),
        default="shared",
        help="whether workflows of a kind share their agents' fixed prefixes",
    )
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("schedule", arguments)
    limit = ("--max-running-requests", str(arguments.max_running_requests))
    roles = [replace(role, arguments=(*role.arguments, *limit)) for role in ROLES]
    pool = pool_tokens(max(arguments.concurrency))
    async with connected(roles, arguments, pool, console) as engines:
        await report.describe(engines)
        report.head(console)
        rounds = await _measure(engines, arguments, console)
    rows = [row for count, by_way in rounds.items() for row in summarise(count, by_way)]
    show(rows, console)
    kinds = [[asdict(agent) for agent in kind] for kind in KINDS]
    report.save(console, {"rows": [asdict(row) for row in rows], "kinds": kinds})


async def _measure(
    engines: Engines, arguments: argparse.Namespace, console: Console
) -> dict[int, dict[str, list[list[float]]]]:
    """Workflow latencies by concurrency, way and round."""
    dice = random.Random(arguments.seed)
    shared = arguments.prefixes == "shared"

    async def run(way: str, count: int) -> list[float]:
        role, linked = _WAYS[way]
        return await play_all(engines[role], batches(count, dice, shared=shared), linked=linked)

    rounds: dict[int, dict[str, list[list[float]]]] = {}
    total = len(arguments.concurrency) * arguments.repeats * len(_WAYS)
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=total)
        for way in _WAYS:
            await run(way, max(arguments.concurrency))
        for count in arguments.concurrency:
            rounds[count] = {way: [] for way in _WAYS}
            for way in alternating(arguments.repeats, list(_WAYS)):
                bars.update(bar, description=f"C={count} {way}")
                rounds[count][way].append(await run(way, count))
                bars.advance(bar)
    return rounds


def batches(count: int, dice: random.Random, *, shared: bool) -> list[list[Workflow]]:
    """``count`` workflows at once, as often as it takes for every kind to occur."""
    times = max(1, -(-len(KINDS) // count))
    all_of_them = workflows(count * times, dice, shared=shared)
    return [all_of_them[i : i + count] for i in range(0, len(all_of_them), count)]


async def play_all(
    engine: EngineClient, batches: Sequence[Sequence[Workflow]], *, linked: bool
) -> list[float]:
    """The batches one after the other; each workflow's seconds."""
    seconds: list[float] = []
    for batch in batches:
        seconds += await play(engine, batch, linked=linked)
    return seconds


def summarise(count: int, rounds: Mapping[str, Sequence[Sequence[float]]]) -> list[Row]:
    """``rounds``: by way, each round's workflow latencies; ``fcfs`` among them."""
    means = {way: median(mean(one) for one in group) for way, group in rounds.items()}
    tails = {
        way: percentile([seconds for one in group for seconds in one], 0.95)
        for way, group in rounds.items()
    }
    return [
        Row(
            way=way,
            concurrency=count,
            mean=means[way],
            p95=tails[way],
            mean_of_fcfs=means[way] / means[FCFS],
            p95_of_fcfs=tails[way] / tails[FCFS],
        )
        for way in rounds
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table beside the paper's figures."""
    table = Table(title="Workflow latency, seconds and of stock FCFS", title_justify="left")
    for name in ("C", "", "mean", "of fcfs", "paper", "p95", "of fcfs"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        paper = PAPER.get(row.way, {})
        table.add_row(
            str(row.concurrency),
            row.way,
            f"{row.mean:.2f}",
            f"{row.mean_of_fcfs:.2f}",
            paper.get(row.concurrency, ""),
            f"{row.p95:.2f}",
            f"{row.p95_of_fcfs:.2f}",
        )
    console.print(table)
    console.print("paper: Figure 9, other workflows on A100s; it gives means only.\n")
