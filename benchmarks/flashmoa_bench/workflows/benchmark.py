"""Chain, mapreduce and slides (FlashAgents §6.2 and 6.3, Figure 7), one and eight at once.

They run on two engines, a small model's and a larger one's, once with stock SGLang and once with
the plugin. Each way of running them adds one thing to the way before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import mean, median

import anyio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.rounds import alternating
from flashmoa_bench.workflows.agents import GUIDE, PAPER
from flashmoa_bench.workflows.played import (
    STOCK,
    WAYS,
    AgentWorkflow,
    Clients,
    Played,
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
# Every copy has room, even where none of them shares anything.
_POOL = 60_000

WorkflowRounds = Mapping[WorkflowWay, Sequence[Sequence[Played]]]


@dataclass(frozen=True, slots=True)
class WorkflowRow:
    """One workflow at one number of copies; by way, medians over rounds of the mean over copies.

    Attributes:
        seconds: from a copy's start to its last token.
        response: from the last token the last agents had to wait for to their own last one.
        same_texts: of all texts, those that are as in the first round of ``unlinked``.
        texts: how many there are.
        paper: FlashAgents' latency over its baseline's, if it has one.
    """

    workflow: str
    copies: int
    seconds: dict[WorkflowWay, float]
    response: dict[WorkflowWay, float]
    same_texts: int
    texts: int
    paper: float | None

    def relative(self, way: WorkflowWay, base: WorkflowWay) -> float | None:
        """Return the latency over that of another way."""
        if way not in self.seconds or base not in self.seconds:
            return None
        return self.seconds[way] / self.seconds[base]


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench workflows``; return the exit status."""
    parser = command_line("workflows", __doc__, ROLES)
    known = [workflow.name for workflow in agent_workflows()]
    parser.add_argument("--workflows", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument(
        "--copies", type=positive, nargs="+", help="at once; by default as the paper has them"
    )
    parser.add_argument(
        "--tokens", type=positive, default=48, help="what an agent of a team writes"
    )
    parser.add_argument("--model", default="default", help="as the engines serve it")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("workflows", arguments)
    async with (
        connected(ROLES, arguments, _POOL, console, [GUIDE, PAPER]) as engines,
        AsyncExitStack() as stack,
    ):
        await report.describe(engines)
        report.head(console)
        clients = _clients(engines, arguments)
        for pair in clients.values():
            stack.push_async_callback(pair.close)
        chosen = [one for one in agent_workflows() if one.name in arguments.workflows]
        rows = await _measure(chosen, clients, arguments, console)
    show(rows, console)
    report.save(console, {"rows": [asdict(row) for row in rows]})


def _clients(engines: Engines, arguments: argparse.Namespace) -> dict[bool, Clients]:
    """Return the clients by whether their engines have the plugin."""

    def pair(small: str, large: str) -> Clients:
        urls = (engines[name].url for name in (small, large))
        return Clients(*(greedy_client(url, arguments.model, arguments.tokens) for url in urls))

    found = {True: pair("small", "large")}
    if "stock_small" in engines and "stock_large" in engines:
        found[False] = pair("stock_small", "stock_large")
    return found


async def _measure(
    chosen: Sequence[AgentWorkflow],
    clients: Mapping[bool, Clients],
    arguments: argparse.Namespace,
    console: Console,
) -> list[WorkflowRow]:
    plan = [(one, copies) for one in chosen for copies in arguments.copies or one.paper]
    ways: dict[str, list[WorkflowWay]] = {
        one.name: [way for way in one.ways if (way not in STOCK) in clients] for one in chosen
    }
    total = sum(len(ways[one.name]) for one, _ in plan) * arguments.repeats
    rows: list[WorkflowRow] = []
    with progress(console) as bars:
        bar = bars.add_task("", total=total)
        for one, copies in plan:
            bars.update(bar, description=f"{one.name}, {copies} at once")
            rounds: dict[WorkflowWay, list[list[Played]]] = {way: [] for way in ways[one.name]}
            for way in rounds:  # A round that is not counted.
                await play(one, clients[way not in STOCK], way, copies)
            for way in alternating(arguments.repeats, list(rounds)):
                rounds[way].append(await play(one, clients[way not in STOCK], way, copies))
                bars.advance(bar)
            rows.append(_row(one, copies, rounds))
    return rows


def _row(workflow: AgentWorkflow, copies: int, rounds: WorkflowRounds) -> WorkflowRow:
    expected = next(iter(rounds.values()))[0]
    texts = [
        text == expected[copy].texts.get(agent)
        for played in rounds.values()
        for one in played
        for copy, run in enumerate(one)
        for agent, text in run.texts.items()
    ]
    return WorkflowRow(
        workflow.name,
        copies,
        seconds={
            way: median(mean(r.seconds for r in one) for one in rounds[way]) for way in rounds
        },
        response={
            way: median(mean(r.response for r in one) for one in rounds[way]) for way in rounds
        },
        same_texts=sum(texts),
        texts=len(texts),
        paper=workflow.paper.get(copies),
    )


def show(rows: Sequence[WorkflowRow], console: Console) -> None:
    """Print the tables, and what their columns are."""
    ways: list[WorkflowWay] = [way for way in WAYS if any(way in row.seconds for row in rows)]
    base: WorkflowWay = "unlinked" if "unlinked" in ways else "shared"
    console.print(_latencies(rows, ways, base))
    for way in ways:
        console.print(f"  {way}: {WAYS[way]}", highlight=False)
    console.print(
        f"  in brackets: over {base}. paper: FlashAgents, Figure 7, over a baseline that runs "
        "one agent at a time.\n",
        highlight=False,
    )
    console.print(_responses(rows, ways))
    for row in rows:
        console.print(
            f"{row.workflow}, {row.copies} at once: {row.same_texts} of {row.texts} texts are the "
            f"same as in the first round of {base}",
            highlight=False,
        )


def _latencies(
    rows: Sequence[WorkflowRow], ways: Sequence[WorkflowWay], base: WorkflowWay
) -> Table:
    title = "End to end, seconds"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("workflow", "N", *ways, "linked/sequential", "paper"):
        table.add_column(name, justify="left" if name == "workflow" else "right")
    for row in rows:
        table.add_row(
            row.workflow,
            str(row.copies),
            *(_cell(row.seconds.get(way), row.relative(way, base)) for way in ways),
            _change(row.relative("linked", "sequential")),
            _change(row.paper),
        )
    return table


def _responses(rows: Sequence[WorkflowRow], ways: Sequence[WorkflowWay]) -> Table:
    title = "Response: from the last token that the last agents waited for to their own, seconds"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("workflow", "N", *ways):
        table.add_column(name, justify="left" if name == "workflow" else "right")
    for row in rows:
        cells = (_cell(row.response.get(way), None) for way in ways)
        table.add_row(row.workflow, str(row.copies), *cells)
    return table


def _cell(seconds: float | None, relative: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f}" + (f" ({relative - 1:+.0%})" if relative not in (None, 1) else "")


def _change(relative: float | None) -> str:
    return "" if relative is None else f"{relative - 1:+.1%}"
