"""Measure chain, mapreduce and slides (FlashAgents §6.2 and 6.3, Figure 7), one and eight at once.

They run on two engines, with a small and a larger model, on stock SGLang and with the plugin. Each
way of running them adds one technique to the previous way.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Annotated, Literal

from autogen_agentchat.teams import BaseGroupChat

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.link.link import Ahead
from flashmoa.observe import CallFinished, Event, Listener
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.critical_path import decoding_seconds
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently
from flashmoa_bench.workflows import agents
from flashmoa_bench.workflows.agents import GUIDE, PAPER

WorkflowWay = Literal["sequential", "unlinked", "shared", "warmed", "linked", "eager"]

WAYS: dict[WorkflowWay, str] = {
    "sequential": "stock SGLang, one agent at a time",
    "unlinked": "stock SGLang, agents side by side where they do not need each other",
    "shared": "the same with the plugin, no links: requests that share a prefix compute it once",
    "warmed": "the known part of a prompt is prefilled before its request comes",
    "linked": "the text of earlier agents too, while they write it",
    "eager": "a slide begins when its point of the outline is complete, not the whole outline",
}
STOCK: Collection[WorkflowWay] = ("sequential", "unlinked")
# Part of a prompt that is prefilled ahead of its request.
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
    """The clients of the small and the larger model's engine."""

    small: FlashMoAChatCompletionClient
    large: FlashMoAChatCompletionClient

    def of(self, agent: str, copy: int) -> FlashMoAChatCompletionClient:
        """Return the client of an agent of a team, of the copy with this number."""
        return self.large if agent in agents.LAST_AGENTS else self.small

    async def flush(self) -> None:
        await self.small.engine.flush_cache()
        await self.large.engine.flush_cache()

    async def close(self) -> None:
        await self.small.close()
        await self.large.close()


def greedy_client(
    url: str, model: str, tokens: int, expected: int | None = None
) -> FlashMoAChatCompletionClient:
    """Make a client whose answers have ``tokens`` tokens and can be compared token for token.

    Args:
        expected: the length that the engine is told.
    """
    told = {} if expected is None else {"expected_output_tokens": expected}
    return FlashMoAChatCompletionClient(
        model=model,
        base_url=url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True, **told},
    )


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """One copy's answers by agent, and its times in seconds.

    Attributes:
        response: time from the end of the last upstream answer to the workflow's end.
        decoding: see :func:`decoding_seconds`.
    """

    seconds: float
    response: float
    decoding: float
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AgentWorkflow:
    """A workflow that can be played.

    Attributes:
        upstream: names of the agents whose answers the last agents read.
        paper: FlashAgents' latency over its baseline's, by number of copies.
        run: plays the copy with a number, which makes it differ, and reports its events.
    """

    name: str
    ways: tuple[WorkflowWay, ...]
    upstream: Collection[str]
    paper: Mapping[int, float]
    run: Callable[[Clients, WorkflowWay, int, Listener], Awaitable[None]]


async def _run_chain(clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
    team = agents.chain(lambda agent: clients.of(agent, copy))
    await _run_team(team, agents.TRIP, way, copy, listener)


async def _run_mapreduce(clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
    sequential = way == "sequential"
    team = agents.mapreduce(lambda agent: clients.of(agent, copy), sequential=sequential)
    await _run_team(team, agents.REVIEW, way, copy, listener)


async def _run_team(
    team: BaseGroupChat, task: str, way: WorkflowWay, copy: int, listener: Listener
) -> None:
    async with link(team, ahead=_AHEAD[way], listener=listener):
        await team.run(task=f"{task} This is request {copy}.")


async def _run_slides(clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
    """Run the workflow of slides, which uses the plain API."""
    small, large = clients.small.engine, clients.large.engine
    async with Workflow(small, ahead=_AHEAD[way], listener=listener) as flow:
        topic = f"for engineers, number {copy}"
        await agents.slides(flow, small, large, topic=topic, eager=way == "eager")


def agent_workflows() -> list[AgentWorkflow]:
    """Return the workflows of FlashAgents §6.2 and 6.3, with the latencies of its Figure 7."""
    ways: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked")
    return [
        AgentWorkflow(
            "chain", ways, list(agents.TRAVEL_AGENTS)[:-1], {1: 0.982, 8: 0.881}, _run_chain
        ),
        AgentWorkflow(
            "mapreduce",
            ("sequential", *ways),
            list(agents.REVIEWERS),
            {1: 0.597, 8: 0.853},
            _run_mapreduce,
        ),
        AgentWorkflow("pptagent", (*ways, "eager"), ["analyst"], {1: 0.759}, _run_slides),
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
        finished = [event for event in events if isinstance(event, CallFinished)]
        ended = max(event.at for event in finished)
        handed_over = max(event.at for event in finished if event.agent in workflow.upstream)
        return WorkflowRun(
            seconds=clock.seconds_of(ended - started),
            response=clock.seconds_of(ended - handed_over),
            decoding=clock.seconds_of(decoding_seconds(calls(events), started)),
            texts={event.agent: event.text for event in finished},
        )

    return await run_concurrently(run, range(copies))


ROLES = (
    Role("small", plugin=True, shape="small", core=0),
    Role("large", plugin=True, shape="large", core=1),
    Role("stock_small", plugin=False, shape="small", core=0, optional=True),
    Role("stock_large", plugin=False, shape="large", core=1, optional=True),
)
# The runs of each round's copies, by way and round.
WorkflowRounds = Mapping[WorkflowWay, Sequence[Sequence[WorkflowRun]]]


@dataclass(frozen=True, slots=True)
class WorkflowRow:
    """One way's figures, in seconds; medians over rounds of the mean over copies.

    Attributes:
        over_unlinked, over_sequential: ``seconds`` over these ways'; ``None`` if not measured.
        paper: FlashAgents' latency over its baseline's; ``None`` if the paper has none.
        least: decode time of the critical path, in the way that decodes fastest.
    """

    workflow: Annotated[str, Column("workflow")]
    copies: Annotated[int, Column("N")]
    way: Annotated[WorkflowWay, Column("way")]
    seconds: Annotated[float, Column("seconds", "{:.2f}")]
    over_unlinked: Annotated[float | None, Column("over unlinked", "{:+.0%}", less=1)]
    over_sequential: Annotated[float | None, Column("over sequential", "{:+.1%}", less=1)]
    paper: Annotated[float | None, Column("paper", "{:+.1%}", less=1)]
    response: Annotated[float, Column("response", "{:.2f}")]
    least: Annotated[float, Column("least", "{:.2f}")]
    same: Annotated[float, Column("same texts", "{:.0%}")]


async def _measure(report: Report) -> None:
    options, rows = report.options, list[WorkflowRow]()
    async with (
        # Every copy has room in this pool, even if the copies share nothing.
        report.connect(ROLES, 60_000, [GUIDE, PAPER]) as engines,
        AsyncExitStack() as stack,
    ):
        clients = _make_clients(engines, options.tokens)
        for pair in clients.values():
            stack.push_async_callback(pair.close)
        grid: list[tuple[AgentWorkflow, int, list[WorkflowWay]]] = [
            (workflow, copies, [way for way in workflow.ways if (way not in STOCK) in clients])
            for workflow in agent_workflows()
            if workflow.name in options.workflows
            for copies in options.copies or workflow.paper
        ]

        async def run(way: WorkflowWay, workflow: AgentWorkflow, copies: int) -> list[WorkflowRun]:
            return await play(workflow, clients[way not in STOCK], way, copies)

        total = sum(len(ways) for _workflow, _copies, ways in grid)
        with RoundPlayer(report.console, options.repeats, total) as player:
            for workflow, copies, ways in grid:
                play_once = partial(run, workflow=workflow, copies=copies)
                label = f"{workflow.name}, {copies} at once:"
                rows += _make_rows(workflow, copies, await player.play(ways, play_once, label))
    played = {row.way for row in rows}
    report.show(
        "End to end, seconds",
        rows,
        "".join(f"  {way}: {about}\n" for way, about in WAYS.items() if way in played)
        + "  response: from the last token that the last agents waited for to their own.\n"
        "  least: what the agents on the critical path decode; no linking can be faster.\n"
        "  paper: FlashAgents, Figure 7, over a baseline that runs one agent at a time.\n"
        "  same texts: as in the first round of the first way.",
        left=("workflow", "way"),
    )
    report.save({"rows": rows})


def _make_clients(engines: Engines, tokens: int) -> dict[bool, Clients]:
    """Return the clients, by whether their engines have the plugin."""

    def make_pair(small: str, large: str) -> Clients:
        urls = (engines[name].url for name in (small, large))
        return Clients(*(greedy_client(url, "default", tokens) for url in urls))

    clients = {True: make_pair("small", "large")}
    if "stock_small" in engines and "stock_large" in engines:
        clients[False] = make_pair("stock_small", "stock_large")
    return clients


def _make_rows(workflow: AgentWorkflow, copies: int, rounds: WorkflowRounds) -> list[WorkflowRow]:
    expected = next(iter(rounds.values()))[0]

    def middle(value: Callable[[WorkflowRun], float]) -> dict[WorkflowWay, float]:
        return {way: median(mean(map(value, runs)) for runs in rounds[way]) for way in rounds}

    def same_share(way: WorkflowWay) -> float:
        return mean(
            text == expected[copy].texts.get(agent)
            for runs in rounds[way]
            for copy, run in enumerate(runs)
            for agent, text in run.texts.items()
        )

    seconds, response = middle(lambda run: run.seconds), middle(lambda run: run.response)
    least = min(middle(lambda run: run.decoding).values())
    return [
        WorkflowRow(
            workflow.name,
            copies,
            way,
            own,
            over_unlinked=own / seconds["unlinked"] if "unlinked" in seconds else None,
            over_sequential=own / seconds["sequential"] if "sequential" in seconds else None,
            paper=workflow.paper.get(copies) if way == "linked" else None,
            response=response[way],
            least=least,
            same=same_share(way),
        )
        for way, own in seconds.items()
    ]


_NAMES = [workflow.name for workflow in agent_workflows()]
main = command(
    "workflows",
    __doc__,
    _measure,
    ROLES,
    Option("--workflows", str, _NAMES, "by default all", choices=_NAMES),
    Option("--copies", positive, None, "at once; by default as in the paper", count="+"),
    Option("--tokens", positive, 48, "that an agent of a team writes"),
)
