"""Measure chain, mapreduce and slides (FlashAgents §6.2 and 6.3, Figure 7), one and eight at once.

They run on two engines, one with a small model and one with a larger one, with stock SGLang and
with the plugin. Each way of running them adds one technique to the way before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median

import anyio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import RoundPlayer
from flashmoa_bench.workflows.agents import GUIDE, PAPER
from flashmoa_bench.workflows.ways import (
    STOCK,
    WAYS,
    AgentWorkflow,
    Clients,
    WorkflowRun,
    WorkflowWay,
    agent_workflows,
    greedy_client,
    play,
)

ROLES = (
    Role("small", plugin=True, shape="small", core=0),
    Role("large", plugin=True, shape="large", core=1),
    Role("stock_small", plugin=False, shape="small", core=0, optional=True),
    Role("stock_large", plugin=False, shape="large", core=1, optional=True),
)
# Every copy has room, even if the copies share nothing.
_POOL = 60_000

# The runs of a round's copies, by way and round.
WorkflowRounds = Mapping[WorkflowWay, Sequence[Sequence[WorkflowRun]]]


@dataclass(frozen=True, slots=True)
class WorkflowRow:
    """The figures of one workflow and number of copies.

    Attributes:
        seconds: time from a copy's start to its last token, by way: the median over rounds of the
            mean over copies.
        response: the same for the time from the last token that the last agents had to wait for to
            their own last one.
        least: seconds in which the agents on the critical path decode, in the way in which they
            decode fastest: no linking can be faster.
        same_texts: number of texts that are the same as in the first round of the first way.
        texts: number of all texts.
        paper: FlashAgents' latency over its baseline's; ``None`` if the paper does not have it.
    """

    workflow: str
    copies: int
    seconds: dict[WorkflowWay, float]
    response: dict[WorkflowWay, float]
    least: float
    same_texts: int
    texts: int
    paper: float | None

    def relative(self, way: WorkflowWay, base: WorkflowWay) -> float | None:
        """Return the latency of a way over that of ``base``; ``None`` unless both were measured."""
        if way not in self.seconds or base not in self.seconds:
            return None
        return self.seconds[way] / self.seconds[base]


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench workflows`` and return the exit status."""
    parser = make_parser("workflows", __doc__, ROLES)
    names = [workflow.name for workflow in agent_workflows()]
    parser.add_argument("--workflows", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--copies", type=positive, nargs="+", help="copies at once; by default as in the paper"
    )
    parser.add_argument(
        "--tokens", type=positive, default=48, help="number that an agent of a team writes"
    )
    parser.add_argument("--model", default="default", help="name by which the engines serve it")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("workflows", arguments)
    async with (
        report.connect(ROLES, _POOL, [GUIDE, PAPER]) as engines,
        AsyncExitStack() as stack,
    ):
        clients = _make_clients(engines, arguments)
        for pair in clients.values():
            stack.push_async_callback(pair.close)
        workflows = [each for each in agent_workflows() if each.name in arguments.workflows]
        rows = await _measure(workflows, clients, arguments, report.console)
    show(rows, report.console)
    report.save({"rows": [asdict(row) for row in rows]})


def _make_clients(engines: Engines, arguments: argparse.Namespace) -> dict[bool, Clients]:
    """Return the clients by whether their engines have the plugin."""

    def make_pair(small: str, large: str) -> Clients:
        urls = (engines[name].url for name in (small, large))
        return Clients(*(greedy_client(url, arguments.model, arguments.tokens) for url in urls))

    clients = {True: make_pair("small", "large")}
    if "stock_small" in engines and "stock_large" in engines:
        clients[False] = make_pair("stock_small", "stock_large")
    return clients


async def _measure(
    workflows: Sequence[AgentWorkflow],
    clients: Mapping[bool, Clients],
    arguments: argparse.Namespace,
    console: Console,
) -> list[WorkflowRow]:
    grid: list[tuple[AgentWorkflow, int, list[WorkflowWay]]] = [
        (workflow, copies, [way for way in workflow.ways if (way not in STOCK) in clients])
        for workflow in workflows
        for copies in arguments.copies or workflow.paper
    ]

    async def run(way: WorkflowWay, workflow: AgentWorkflow, copies: int) -> list[WorkflowRun]:
        return await play(workflow, clients[way not in STOCK], way, copies)

    rows: list[WorkflowRow] = []
    total = sum(len(ways) for _workflow, _copies, ways in grid)
    with RoundPlayer(console, arguments.repeats, total) as player:
        for workflow, copies, ways in grid:
            play_once = partial(run, workflow=workflow, copies=copies)
            for way in ways:  # This round is not counted.
                await play_once(way)
            label = f"{workflow.name}, {copies} at once:"
            rows.append(_make_row(workflow, copies, await player.play(ways, play_once, label)))
    return rows


def _make_row(workflow: AgentWorkflow, copies: int, rounds: WorkflowRounds) -> WorkflowRow:
    expected = next(iter(rounds.values()))[0]
    comparisons = [
        text == expected[copy].texts.get(agent)
        for way_rounds in rounds.values()
        for runs in way_rounds
        for copy, run in enumerate(runs)
        for agent, text in run.texts.items()
    ]

    def middle(value: Callable[[WorkflowRun], float]) -> dict[WorkflowWay, float]:
        return {way: median(mean(map(value, runs)) for runs in rounds[way]) for way in rounds}

    return WorkflowRow(
        workflow.name,
        copies,
        seconds=middle(lambda run: run.seconds),
        response=middle(lambda run: run.response),
        least=min(middle(lambda run: run.decoding).values()),
        same_texts=sum(comparisons),
        texts=len(comparisons),
        paper=workflow.paper.get(copies),
    )


def show(rows: Sequence[WorkflowRow], console: Console) -> None:
    """Print the tables, and explain their columns."""
    ways: list[WorkflowWay] = [way for way in WAYS if any(way in row.seconds for row in rows)]
    base: WorkflowWay = "unlinked" if "unlinked" in ways else "shared"
    console.print(_latency_table(rows, ways, base))
    for way in ways:
        console.print(f"  {way}: {WAYS[way]}", highlight=False)
    console.print(
        f"  least: what the agents on the critical path decode; no linking can be faster.\n"
        f"  in brackets: over {base}. paper: FlashAgents, Figure 7, over a baseline that runs "
        "one agent at a time.\n",
        highlight=False,
    )
    console.print(_response_table(rows, ways))
    for row in rows:
        console.print(
            f"{row.workflow}, {row.copies} at once: {row.same_texts} of {row.texts} texts are the "
            f"same as in the first round of {base}",
            highlight=False,
        )


def _latency_table(
    rows: Sequence[WorkflowRow], ways: Sequence[WorkflowWay], base: WorkflowWay
) -> Table:
    columns = ("workflow", "N", *ways, "least", "linked/sequential", "paper")
    table = make_table("End to end, seconds", *columns, left=("workflow",), box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            row.workflow,
            str(row.copies),
            *(_format_cell(row.seconds.get(way), row.relative(way, base)) for way in ways),
            _format_cell(row.least, row.least / row.seconds[base] if base in row.seconds else None),
            _format_change(row.relative("linked", "sequential")),
            _format_change(row.paper),
        )
    return table


def _response_table(rows: Sequence[WorkflowRow], ways: Sequence[WorkflowWay]) -> Table:
    title = "Response: from the last token that the last agents waited for to their own, seconds"
    table = make_table(title, "workflow", "N", *ways, left=("workflow",), box=SIMPLE_HEAD)
    for row in rows:
        cells = (_format_cell(row.response.get(way), None) for way in ways)
        table.add_row(row.workflow, str(row.copies), *cells)
    return table


def _format_cell(seconds: float | None, relative: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f}" + (f" ({relative - 1:+.0%})" if relative not in (None, 1) else "")


def _format_change(relative: float | None) -> str:
    return "" if relative is None else f"{relative - 1:+.1%}"
