"""Measure the time to an agent's first token after its tools have run.

Agents call tools, wait for the results, and ask again with the results after the conversation so
far. *Strangers*: the KV pool has room for the agents, but other requests fill it while tools run.
*Pressure*: the pool has room for a part of the agents only. *Parallel*: two tools run at once, and
the first one's long result is there before the second tool ends. *Reflection*: the next prompt has
another beginning (AutoGen's reflection on tools names no tools), so its KV is not there.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Annotated

import anyio

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive, positive_float
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.requests import ask, feeding, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, percentile, run_concurrently


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that takes ``least`` to ``most`` seconds, and returns ``tokens`` tokens."""

    least: float
    most: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ToolAgents:
    """Agents that begin at once, share no text, and call tools several times each.

    Attributes:
        prompt, answer: tokens of an agent's first prompt, and of each answer.
        tools: a call's tools, which run at once, in the order of their ends.
        reflects: whether a prompt after tools begins otherwise than the previous prompt.
        strangers: other requests per second; each has half the tokens of a first prompt.
    """

    agents: int
    prompt: int
    answer: int
    calls: int
    tools: tuple[Tool, ...]
    reflects: bool = False
    strangers: float = 0.0

    @property
    def result(self) -> int:
        """Return the tokens of a call's results."""
        return sum(tool.tokens for tool in self.tools)

    @property
    def context(self) -> int:
        """Return an agent's final number of tokens."""
        return self.prompt + self.calls * (self.answer + self.result) + self.answer


@dataclass(frozen=True, slots=True)
class AfterTools:
    """A request after tools; ``late`` prompt tokens were computed after it came."""

    seconds: float
    prompt: int
    late: int


async def play(
    engine: EngineClient, load: ToolAgents, dice: random.Random, *, is_linked: bool
) -> list[AfterTools]:
    """Play all agents on an empty cache, and return their requests after tools."""
    await engine.flush_cache()
    seed = dice.random()
    played: list[list[AfterTools]] = []

    async def run(number: int) -> list[AfterTools]:
        return await _play_agent(engine, load, random.Random(seed + number), is_linked)

    async with anyio.create_task_group() as group:
        if load.strangers:
            group.start_soon(_send_strangers, engine, load, random.Random(seed))
        played += await run_concurrently(run, range(load.agents))
        group.cancel_scope.cancel()
    return [request for requests in played for request in requests]


async def _play_agent(
    engine: EngineClient, load: ToolAgents, dice: random.Random, is_linked: bool
) -> list[AfterTools]:
    """Play one agent. If it is linked, a stream gets its next prompt as results come."""
    known = random_ids(dice, load.prompt)
    answer = await ask(engine, known, load.answer)
    requests: list[AfterTools] = []
    for _ in range(load.calls):
        start = random_ids(dice, load.prompt) if load.reflects else known[: load.prompt]
        known = [*start, *known[load.prompt :], *answer.ids]
        results: list[int] = []
        async with feeding(
            engine, known, lambda results=results: results, is_linked=is_linked
        ) as claim:
            called = clock.now()
            for tool in load.tools:
                await clock.sleep_until(called + dice.uniform(tool.least, tool.most))
                results += random_ids(dice, tool.tokens)
            known, asked = [*known, *results], clock.now()
            answer = await ask(engine, known, load.answer, claim())
        requests.append(AfterTools(answer.first - asked, len(known), answer.late_tokens))
    return requests


async def _send_strangers(engine: EngineClient, load: ToolAgents, dice: random.Random) -> None:
    """Send requests of strangers at random times until this is cancelled."""
    async with anyio.create_task_group() as group:
        while True:
            await clock.sleep(dice.expovariate(load.strangers))
            group.start_soon(ask, engine, random_ids(dice, load.prompt // 2), load.answer)


ROLES = (Role("stock", plugin=False), Role("flashmoa", plugin=True))
# The engine's role, and whether agents are linked, by way.
WAYS = {"stock": ("stock", False), "linked": ("flashmoa", True)}
WORKLOADS = ("strangers", "pressure", "parallel", "reflection")


@dataclass(frozen=True, slots=True)
class ToolsRow:
    """One way of a workload, over its requests after tools; in seconds and tokens.
    Attributes:
        median, p90: medians over rounds of the median and the 90th percentile to first tokens.
        mean: mean over all requests.
    """

    workload: Annotated[str, Column("workload")]
    way: Annotated[str, Column("")]
    median: Annotated[float, Column("p50", "{:.1f}", 1000)]
    of_stock: Annotated[float, Column("of stock", "{:.2f}x")]
    p90: Annotated[float, Column("p90", "{:.1f}", 1000)]
    mean: Annotated[float, Column("mean", "{:.1f}", 1000)]
    kept: Annotated[float, Column("kept", "{:.0%}")]
    late: Annotated[float, Column("late", "{:.0f}")]
    computed: Annotated[float, Column("computed", "{:.1f}", 1000)]
    bound: Annotated[float, Column("bound", "{:.1f}", 1000)]


def workloads(arguments: argparse.Namespace) -> dict[str, ToolAgents]:
    """Return all workloads, by name."""
    least, most = arguments.seconds
    one = (Tool(least, most, arguments.result),)
    pressure = ToolAgents(
        arguments.agents, arguments.prompt, arguments.answer, arguments.calls, one
    )
    # The other workloads find room in the same pool.
    some = replace(pressure, agents=max(1, arguments.agents // 4))
    few = replace(some, agents=max(1, arguments.agents // 8), calls=min(arguments.calls, 2))
    middle = (least + most) / 2
    two = (Tool(least, least, arguments.long_result), Tool(middle, middle, arguments.result))
    return {
        "strangers": replace(some, strangers=6.0),
        "pressure": pressure,
        "parallel": replace(few, tools=two),
        "reflection": replace(few, reflects=True),
    }


async def _measure(report: Report) -> None:
    options = report.options
    repeats, dice = options.repeats, random.Random(options.seed)
    loads = workloads(options)
    # Under pressure, all agents together need twice the pool.
    pool = loads["pressure"].agents * loads["pressure"].context // 2
    # By default a modelled GPU has the GPU's own pool.
    small = ("--max-total-tokens", str(pool)) if options.device else ()
    rows: list[ToolsRow] = []
    async with report.connect([replace(role, arguments=small) for role in ROLES], pool) as engines:

        async def run(way: str, load: ToolAgents) -> list[AfterTools]:
            role, is_linked = WAYS[way]
            return await play(engines[role], load, dice, is_linked=is_linked)

        chosen = {name: loads[name] for name in options.measure}
        with RoundPlayer(report.console, repeats, len(chosen) * len(WAYS)) as player:
            for way in WAYS:
                await run(way, replace(next(iter(chosen.values())), agents=1, calls=1))
            for name, load in chosen.items():
                rounds = await player.play(list(WAYS), partial(run, load=load), name, warm_up=False)
                alone = partial(_measure_alone, engines["flashmoa"], load, dice, repeats)
                bound = await alone(load.tools[-1].tokens)
                # For parallel tools, stock SGLang has the conversation so far; nothing evicts it.
                computed = await alone(load.result if len(load.tools) > 1 else load.context)
                rows += summarise(name, rounds, computed, bound)
        gave_way = sum(rank.gave_way for rank in (await engines["flashmoa"].info()).kv)
    report.show(
        "Time to the first token after tools, ms",
        rows,
        "kept: requests with less than half of their tokens computed after they came. late: tokens "
        "that were computed then, median. Alone on an idle engine, a request takes *computed* if "
        "everything that can be missing is computed, and *bound* if only the last tool's result "
        "is.",
        left=("workload", ""),
    )
    report.console.print(f"Streams gave way to requests {gave_way} times.\n")
    report.save({"rows": rows, "pool": pool, "gave_way": gave_way})


async def _measure_alone(
    engine: EngineClient, load: ToolAgents, dice: random.Random, repeats: int, late: int
) -> float:
    """Return an idle engine's median seconds to the first token if ``late`` tokens are not cached.

    The prompt's length is the mean of an agent's first and last prompts.
    """
    tokens, seconds = (load.prompt + load.context) // 2, list[float]()
    for _ in range(repeats):
        await engine.flush_cache()
        prompt: Sequence[int] = random_ids(dice, tokens)
        if late < tokens:
            await ask(engine, prompt[: tokens - late], 1)
        asked = clock.now()
        seconds.append((await ask(engine, prompt, 1)).first - asked)
    return median(seconds)


def summarise(
    workload: str,
    rounds: Mapping[str, Sequence[Sequence[AfterTools]]],
    computed: float,
    bound: float,
) -> list[ToolsRow]:
    """Summarise a workload's rounds; each has all requests after tools."""
    medians = {
        way: median(median(request.seconds for request in requests) for requests in played)
        for way, played in rounds.items()
    }
    rows: list[ToolsRow] = []
    for way, played in rounds.items():
        requests = [request for one in played for request in one]
        row = ToolsRow(
            workload=workload,
            way=way,
            median=medians[way],
            p90=median(percentile([each.seconds for each in one], 0.9) for one in played),
            of_stock=medians[way] / medians["stock"],
            mean=mean(each.seconds for each in requests),
            kept=mean(each.late < each.prompt / 2 for each in requests),
            late=median(each.late for each in requests),
            computed=computed,
            bound=bound,
        )
        rows.append(row)
    return rows


main = command(
    "tools",
    __doc__,
    _measure,
    ROLES,
    Option("--measure", str, list(WORKLOADS), "workloads", choices=WORKLOADS),
    Option("--agents", positive, 16, "agents under pressure"),
    Option("--prompt", positive, 4000, "tokens of first prompts"),
    Option("--answer", positive, 60, "tokens of each answer"),
    Option("--calls", positive, 4, "calls of tools by each agent"),
    Option("--result", positive, 100, "tokens of a result"),
    Option("--long-result", positive, 2000, "tokens of a long one"),
    Option("--seconds", positive_float, [1.0, 5.0], "shortest and longest tool", count=2),
)
