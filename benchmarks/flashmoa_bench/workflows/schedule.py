"""Measure links and shortest-job-first together (FlashAgents §6.6, Figure 9).

The chain and mapreduce of §6.2 run on two engines, with a small and a larger model. Each engine
runs few requests at a time, so that a queue forms. Workflow latency is measured with stock SGLang
in order of arrival (fcfs), with the plugin's shortest-job-first (sjf), with its links, and both.
Clients tell how long an agent's answer was in an earlier run; now it is 30 % shorter or longer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import mean, median
from typing import Annotated

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import RoundPlayer, percentile
from flashmoa_bench.workflows import agents
from flashmoa_bench.workflows.agents import GUIDE, PAPER
from flashmoa_bench.workflows.benchmark import (
    AgentWorkflow,
    Clients,
    WorkflowRun,
    agent_workflows,
    greedy_client,
    play,
)

# An answer's tokens over the same agent's in the earlier run.
CHANGES = (0.7, 1.3)
# The engines' arguments, and whether they have the plugin, by the prefix of their names.
_PAIRS = {
    "stock_": (False, ("--schedule-policy", "fcfs")),
    "": (True, ("--flashmoa-schedule", "sglang")),
    "sjf_": (True, ("--flashmoa-schedule", "sjf")),
}
ROLES = tuple(
    Role(f"{pair}{shape}", plugin=plugin, arguments=arguments, shape=shape, core=core)
    for pair, (plugin, arguments) in _PAIRS.items()
    for core, shape in enumerate(("small", "large"))
)
FCFS = "fcfs"
# The engines, and whether the agents are linked, by way.
_WAYS = {
    FCFS: ("stock_", False),
    "sjf": ("sjf_", False),
    "linked": ("", True),
    "linked + sjf": ("sjf_", True),
}
# Latency over FCFS's in Figure 9, by concurrency. The paper's text gives one figure of the first
# two ways for both concurrencies, and none for a single workflow.
PAPER_RATIOS = {
    "sjf": {1: "0.65-0.70", 10: "0.65-0.70"},
    "linked": {1: "0.57", 10: "0.57"},
    "linked + sjf": {1: "0.44", 10: "0.63"},
}
# The runs of each round's copies, by way and round.
ScheduleRounds = Mapping[str, Sequence[Sequence[WorkflowRun]]]


@dataclass(frozen=True, slots=True)
class ProfiledClients(Clients):
    """Clients that tell an engine how long each agent's answer was in an earlier run.

    Attributes:
        by_change: the client of each agent, by the change of its answer since then.
    """

    by_change: Mapping[tuple[str, float], FlashMoAChatCompletionClient]

    def of(self, agent: str, copy: int) -> FlashMoAChatCompletionClient:
        change = random.Random(f"{agent} of copy {copy}").choice(CHANGES)
        return self.by_change[agent, change]

    async def close(self) -> None:
        for client in (self.small, self.large, *self.by_change.values()):
            await client.close()


def earlier_lengths(tokens: int, seed: int) -> dict[str, int]:
    """Return the tokens of each agent's answer in the earlier run.

    Agents differ: they wrote half to one and a half times ``tokens``.
    """
    dice = random.Random(seed)
    names = [*agents.TRAVEL_AGENTS, *agents.REVIEWERS, agents.META]
    return {name: round(tokens * dice.uniform(0.5, 1.5)) for name in names}


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One way's workflow latency in seconds.

    Attributes:
        seconds: median over rounds of the mean over workflows.
        p95: 95th percentile of the workflows of all rounds.
        of_fcfs, p95_of_fcfs: over stock FCFS's at this concurrency.
        bound: decode time of the critical path over FCFS's latency, in the way that decodes
            fastest.
    """

    workflow: Annotated[str, Column("workflow")]
    concurrency: Annotated[int, Column("C")]
    way: Annotated[str, Column("way")]
    seconds: Annotated[float, Column("mean", "{:.2f}")]
    of_fcfs: Annotated[float, Column("of fcfs", "{:.3f}")]
    bound: Annotated[float, Column("bound", "{:.3f}")]
    p95: Annotated[float, Column("p95", "{:.2f}")]
    p95_of_fcfs: Annotated[float, Column("of fcfs", "{:.3f}")]

    @property
    def paper(self) -> Annotated[str, Column("paper")]:
        return PAPER_RATIOS.get(self.way, {}).get(self.concurrency, "")


async def _measure(report: Report) -> None:
    options, rows = report.options, list[ScheduleRow]()
    limit = ("--max-running-requests", str(options.max_running_requests))
    roles = [replace(role, arguments=(*role.arguments, *limit)) for role in ROLES]
    lengths = earlier_lengths(options.tokens, options.seed)
    async with (
        report.connect(roles, 60_000, [GUIDE, PAPER]) as engines,
        AsyncExitStack() as stack,
    ):
        clients = {pair: _make_clients(engines, pair, lengths) for pair in _PAIRS}
        for each in clients.values():
            stack.push_async_callback(each.close)

        async def run(way: str, workflow: AgentWorkflow, count: int) -> list[WorkflowRun]:
            pair, linked = _WAYS[way]
            return await play(workflow, clients[pair], "linked" if linked else "unlinked", count)

        chosen = [each for each in agent_workflows() if each.name in options.workflows]
        total = len(chosen) * len(options.concurrency) * len(_WAYS)
        with RoundPlayer(report.console, options.repeats, total) as player:
            for workflow in chosen:
                for count in options.concurrency:
                    play_once = partial(run, workflow=workflow, count=count)
                    label = f"{workflow.name}, {count} at once:"
                    rounds = await player.play(list(_WAYS), play_once, label)
                    rows += summarise(workflow.name, count, rounds)
    report.show(
        "Workflow latency, seconds and of stock FCFS",
        rows,
        "  bound: what the agents on the critical path decode; no order and no link is faster.\n"
        "  paper: FlashAgents, Figure 9, on A800s; it gives means only, for all workflows.",
        left=("workflow", "way"),
    )
    report.save({"rows": rows, "earlier_lengths": lengths})


def _make_clients(engines: Engines, pair: str, lengths: Mapping[str, int]) -> ProfiledClients:
    small, large = (engines[f"{pair}{shape}"].url for shape in ("small", "large"))

    def make(name: str, change: float) -> FlashMoAChatCompletionClient:
        url = large if name in agents.LAST_AGENTS else small
        return greedy_client(url, "default", round(change * lengths[name]), lengths[name])

    by_change = {(name, change): make(name, change) for name in lengths for change in CHANGES}
    first, second = (greedy_client(url, "default", 1) for url in (small, large))
    return ProfiledClients(first, second, by_change)


def summarise(workflow: str, count: int, rounds: ScheduleRounds) -> list[ScheduleRow]:
    """Summarise each round's workflow latencies, by way; ``fcfs`` is one way."""
    means = {
        way: median(mean(run.seconds for run in runs) for runs in rounds[way]) for way in rounds
    }
    least = min(
        median(mean(run.decoding for run in runs) for runs in group) for group in rounds.values()
    )
    tails = {
        way: percentile([run.seconds for run in chain.from_iterable(group)], 0.95)
        for way, group in rounds.items()
    }
    return [
        ScheduleRow(
            workflow,
            count,
            way,
            seconds=means[way],
            of_fcfs=means[way] / means[FCFS],
            bound=least / means[FCFS],
            p95=tails[way],
            p95_of_fcfs=tails[way] / tails[FCFS],
        )
        for way in rounds
    ]


_NAMES = ["chain", "mapreduce"]
main = command(
    "schedule",
    __doc__,
    _measure,
    ROLES,
    Option("--workflows", str, _NAMES, "by default both", choices=_NAMES),
    Option("--concurrency", positive, [1, 10], "workflows at once"),
    Option("--max-running-requests", positive, 4, "limit of engines started here"),
    Option("--tokens", positive, 48, "mean length of an answer in the earlier run"),
)
