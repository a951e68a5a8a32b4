"""Measure chain, mapreduce and slides (FlashAgents §6.2 and 6.3, Figure 7), one and eight at once.

They run on two engines, one with a small model and one with a larger one, with stock SGLang and
with the plugin. Each way of running them adds one technique to the way before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Literal, Protocol

import anyio
from autogen_agentchat.teams import BaseGroupChat
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient, TeamLink, link, watch
from flashmoa.linking.link import Ahead
from flashmoa.observe import CallFinished, Event, Listener
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.critical_path import decoding_seconds
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently
from flashmoa_bench.workflows import agents
from flashmoa_bench.workflows.agents import GUIDE, PAPER

WorkflowWay = Literal["sequential", "unlinked", "shared", "warmed", "linked", "eager"]

WAYS: dict[WorkflowWay, str] = {
    "sequential": "stock SGLang, one agent at a time",
    "unlinked": "stock SGLang, agents side by side where they do not need each other",
    "shared": "the same with the plugin, no links: requests that share a prefix compute it once",
    "warmed": "what is known of a prompt is prefilled before its request comes",
    "linked": "the text of the agents before it, too, as they write it",
    "eager": "a slide is begun when its point of the outline is complete, not when all are",
}
STOCK: Collection[WorkflowWay] = ("sequential", "unlinked")
# What part of a prompt is prefilled ahead of its request.
_AHEAD: dict[WorkflowWay, Ahead] = {
    "sequential": "nothing",
    "unlinked": "nothing",
    "shared": "nothing",
    "warmed": "known",
    "linked": "text",
    "eager": "text",
}


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of the small model's engine and of the larger one's."""

    small: FlashMoAChatCompletionClient
    large: FlashMoAChatCompletionClient

    async def flush(self) -> None:
        """Empty both engines' caches."""
        await self.small.engine.flush_cache()
        await self.large.engine.flush_cache()

    async def close(self) -> None:
        """Close both clients."""
        await self.small.close()
        await self.large.close()


def greedy_client(url: str, model: str, tokens: int) -> FlashMoAChatCompletionClient:
    """Make a client whose answers can be compared token for token.

    Each answer has ``tokens`` tokens, at temperature 0.
    """
    return FlashMoAChatCompletionClient(
        model=model,
        base_url=url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """The times and texts of one copy of a workflow.

    Attributes:
        seconds: time from the copy's start to its last token.
        response: seconds from the end of the last upstream answer to the end of the workflow.
        decoding: seconds of the critical path without what linking can save; see
            :func:`decoding_seconds`.
        texts: the agents' answers, by the agents' names.
    """

    seconds: float
    response: float
    decoding: float
    texts: Mapping[str, str]


class AgentWorkflow(Protocol):
    """A workflow that can be played.

    Attributes:
        ways: ways in which it can be played.
        paper: FlashAgents' latency over that of its baseline, by number of copies.
        upstream: names of the agents that the last ones wait for.
    """

    name: str
    ways: tuple[WorkflowWay, ...]
    paper: Mapping[int, float]
    upstream: Collection[str]

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
        """Play copy number ``copy``, which differs from the others, and report its events."""
        ...


class TeamWorkflow:
    """Plays an AutoGen team as a workflow.

    Args:
        build: makes the team, given the clients of the small and of the larger model; the
            function's name is the workflow's.
        task: the team's task.
        upstream, paper: see :class:`AgentWorkflow`.
        build_sequential: makes the team with its agents one after the other, if that is different.
            Without it, the workflow is not played as ``sequential``.
    """

    def __init__(
        self,
        build: Callable[
            [FlashMoAChatCompletionClient, FlashMoAChatCompletionClient], BaseGroupChat
        ],
        task: str,
        upstream: Collection[str],
        paper: Mapping[int, float],
        build_sequential: Callable[..., BaseGroupChat] | None = None,
    ) -> None:
        self.name = build.__name__
        self.upstream = upstream
        self.paper = paper
        self._build = build
        self._build_sequential = build_sequential
        self._task = task
        ways: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked")
        self.ways: tuple[WorkflowWay, ...] = ("sequential", *ways) if build_sequential else ways

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
        """Play one copy, whose task has the copy's number."""
        build = self._build
        if way == "sequential" and self._build_sequential is not None:
            build = self._build_sequential
        team = build(clients.small, clients.large)
        linked = attach(team, _AHEAD[way], listener)
        try:
            await team.run(task=f"{self._task} This is request {copy}.")
        finally:
            await linked.close()


def attach(team: BaseGroupChat, ahead: Ahead, listener: Listener) -> TeamLink:
    """Link a team, or only watch it if ``ahead`` is ``"nothing"``."""
    if ahead == "nothing":
        return watch(team, listener)
    return link(team, stream=ahead == "text", listener=listener)


class SlidesWorkflow:
    """Plays the slides workflow (FlashAgents §6.3), which uses the plain API."""

    name = "pptagent"
    ways: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked", "eager")
    upstream: Collection[str] = ("analyst",)
    paper: Mapping[int, float] = {1: 0.759}

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
        """Play one copy, whose topic has the copy's number."""
        small, large = clients.small.engine, clients.large.engine
        async with Workflow(small, ahead=_AHEAD[way], listener=listener) as flow:
            topic = f"for engineers, number {copy}"
            await agents.slides(flow, small, large, topic=topic, eager=way == "eager")


def agent_workflows() -> list[AgentWorkflow]:
    """Return the workflows of FlashAgents §6.2 and 6.3, with the latencies of its Figure 7."""
    return [
        TeamWorkflow(
            agents.chain, agents.TRIP, list(agents.TRAVEL_AGENTS)[:-1], {1: 0.982, 8: 0.881}
        ),
        TeamWorkflow(
            agents.mapreduce,
            agents.REVIEW,
            list(agents.REVIEWERS),
            {1: 0.597, 8: 0.853},
            partial(agents.mapreduce, sequential=True),
        ),
        SlidesWorkflow(),
    ]


async def play(
    workflow: AgentWorkflow, clients: Clients, way: WorkflowWay, copies: int
) -> list[WorkflowRun]:
    """Play ``copies`` copies of a workflow at once, on empty caches."""
    await clients.flush()

    async def run(copy: int) -> WorkflowRun:
        events: list[Event] = []
        started = time.time()
        await workflow.run(clients, way, copy, events.append)
        return _summarise_run(events, started, workflow.upstream)

    return await run_concurrently(run, range(copies))


def _summarise_run(
    events: Sequence[Event], started: float, upstream: Collection[str]
) -> WorkflowRun:
    finished = [event for event in events if isinstance(event, CallFinished)]
    ended = max(event.at for event in finished)
    handed_over = max(event.at for event in finished if event.agent in upstream)
    texts = {event.agent: event.text for event in finished}
    return WorkflowRun(
        clock.seconds_of(ended - started),
        clock.seconds_of(ended - handed_over),
        clock.seconds_of(decoding_seconds(calls(events), started)),
        texts,
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
    report.save({"rows": rows})


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
