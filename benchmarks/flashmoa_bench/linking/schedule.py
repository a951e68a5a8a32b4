"""Measure streaming and shortest-job-first together (FlashAgents §6.6, Figure 9).

Workflows of three agents, whose lengths are known, run on one engine. The engine runs few requests
at a time, so that a queue forms. Workflow latency is measured with stock SGLang in order of arrival
(FCFS), with FlashMoA's shortest-job-first, with its links and with both, and compared with FCFS;
and with stock SGLang in this order with mixed chunks of other sizes, which may be faster.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from statistics import mean, median

import anyio
from rich.console import Console

from flashmoa_bench.harness.command_line import (
    add_stock_forwards,
    make_parser,
    mixed_roles,
    positive,
)
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import RoundPlayer, percentile
from flashmoa_bench.linking.agent_workflows import (
    Kinds,
    make_batches,
    play,
    pool_tokens,
    scale_kinds,
)

ROLES = (
    Role("stock", plugin=False, arguments=("--schedule-policy", "fcfs")),
    Role("flashmoa", plugin=True, arguments=("--flashmoa-schedule", "sglang")),
    Role("sjf", plugin=True, arguments=("--flashmoa-schedule", "sjf")),
)
FCFS = "fcfs"
# The engine's role and whether the agents are linked, by way.
_WAYS = {
    FCFS: ("stock", False),
    "sjf": ("sjf", False),
    "linked": ("flashmoa", True),
    "linked + sjf": ("sjf", True),
}
# Latency over that of FCFS in Figure 9, by concurrency. For the first two ways, the paper's text
# gives one figure for both concurrencies.
PAPER = {
    "sjf": {1: "0.65-0.70", 10: "0.65-0.70"},
    "linked": {1: "0.57", 10: "0.57"},
    "linked + sjf": {1: "0.44", 10: "0.63"},
}


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One way at one concurrency; workflow latency in seconds.

    Attributes:
        mean: median over rounds of the mean over workflows.
        p95: 95th percentile of the workflows of all rounds.
        mean_of_fcfs, p95_of_fcfs: ``mean`` and ``p95`` over those of stock FCFS at this
            concurrency.
    """

    way: str
    concurrency: int
    mean: float
    p95: float
    mean_of_fcfs: float
    p95_of_fcfs: float


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench schedule`` and return the exit status."""
    parser = make_parser("schedule", __doc__, ROLES)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 10])
    parser.add_argument(
        "--max-running-requests", type=positive, default=4, help="limit of engines started here"
    )
    parser.add_argument(
        "--prefixes",
        choices=("shared", "own"),
        default="shared",
        help="whether workflows of a kind share their agents' fixed prefixes",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        default=1,
        metavar="F",
        help="factor of the lengths of prompts and answers; with 5 the longest prompts are as long "
        "as the paper's guide",
    )
    add_stock_forwards(parser, [256, 1024])
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("schedule", arguments)
    limit = ("--max-running-requests", str(arguments.max_running_requests))
    mixed = mixed_roles(arguments.stock_forwards, *ROLES[0].arguments)
    roles = [
        replace(role, arguments=(*role.arguments, *limit)) for role in (*ROLES, *mixed.values())
    ]
    kinds = scale_kinds(arguments.lengths)
    pool = pool_tokens(max(arguments.concurrency), kinds)
    async with report.connect(roles, pool) as engines:
        rounds = await _measure(engines, kinds, arguments, report.console)
    rows = [row for count, by_way in rounds.items() for row in summarise(count, by_way)]
    show(rows, report.console)
    agents = [[asdict(agent) for agent in kind] for kind in kinds]
    report.save({"rows": [asdict(row) for row in rows], "kinds": agents})


async def _measure(
    engines: Engines, kinds: Kinds, arguments: argparse.Namespace, console: Console
) -> dict[int, dict[str, list[list[float]]]]:
    """Return workflow latencies in seconds, by concurrency, way and round."""
    dice = random.Random(arguments.seed)
    shared = arguments.prefixes == "shared"
    mixed = mixed_roles(arguments.stock_forwards)
    ways = {way: (role.name, False) for way, role in mixed.items() if role.name in engines} | _WAYS

    async def run(way: str, count: int) -> list[float]:
        role, linked = ways[way]
        seconds: list[float] = []
        for batch in make_batches(count, dice, kinds, shared=shared):
            seconds += await play(engines[role], batch, linked=linked)
        return seconds

    counts: list[int] = arguments.concurrency
    with RoundPlayer(console, arguments.repeats, len(counts) * len(ways)) as player:
        for way in ways:
            await run(way, max(counts))
        return {
            count: await player.play(list(ways), partial(run, count=count), f"C={count}")
            for count in counts
        }


def summarise(count: int, rounds: Mapping[str, Sequence[Sequence[float]]]) -> list[ScheduleRow]:
    """Summarise ``rounds``: each round's workflow latencies by way, ``fcfs`` among them."""
    means = {way: median(mean(each) for each in group) for way, group in rounds.items()}
    tails = {
        way: percentile(list(chain.from_iterable(group)), 0.95) for way, group in rounds.items()
    }
    return [
        ScheduleRow(
            way=way,
            concurrency=count,
            mean=means[way],
            p95=tails[way],
            mean_of_fcfs=means[way] / means[FCFS],
            p95_of_fcfs=tails[way] / tails[FCFS],
        )
        for way in rounds
    ]


def show(rows: Sequence[ScheduleRow], console: Console) -> None:
    """Print the table, with the paper's figures next to ours."""
    title = "Workflow latency, seconds and of stock FCFS"
    table = make_table(title, "C", "", "mean", "of fcfs", "paper", "p95", "of fcfs")
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
