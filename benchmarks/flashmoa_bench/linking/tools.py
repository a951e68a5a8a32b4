"""Measure the time to an agent's first token after its tools have run.

Agents answer with calls of tools, wait for the results, and ask again with the results behind all
that was said before. *Strangers*: the KV pool has room for the agents, but other requests fill it
while tools run. *Pressure*: it has room for a part of the agents only. *Parallel*: two tools run at
once, and the result of the first, which is long, is there before the second ends. *Reflection*: the
next prompt begins in another way (AutoGen's reflection on tools names no tools), so that its KV is
not there.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import Feeder, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, percentile, run_concurrently


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that takes between ``least`` and ``most`` seconds, and returns ``tokens`` tokens."""

    least: float
    most: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ToolAgents:
    """Agents that call tools, each several times; they begin at once and share no text.

    Attributes:
        prompt, answer: tokens of an agent's first prompt, and of each of its answers.
        calls: how often each agent calls its tools.
        tools: the tools of one call, which run at once, in the order in which they end.
        reflects: whether a prompt after tools begins in another way than the one before.
        strangers: how many requests come in a second that belong to none of the agents; each has
            half as many tokens as an agent's first prompt.
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
        """Return the number of tokens of all results of one call."""
        return sum(tool.tokens for tool in self.tools)

    @property
    def context(self) -> int:
        """Return the number of tokens of an agent in the end."""
        return self.prompt + self.calls * (self.answer + self.result) + self.answer


@dataclass(frozen=True, slots=True)
class AfterTools:
    """A request after tools.

    Attributes:
        seconds: time to its first token.
        prompt, late: number of its tokens, and of those computed after the request had come.
    """

    seconds: float
    prompt: int
    late: int


async def play(
    engine: EngineClient, load: ToolAgents, dice: random.Random, *, is_linked: bool
) -> list[AfterTools]:
    """Play all agents on an empty cache, with fresh tokens. Return their requests after tools."""
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
    """Play one agent. If it is linked, its next prompt is fed to a stream as results come."""
    known = random_ids(dice, load.prompt)
    answer = await ask(engine, known, load.answer)
    requests: list[AfterTools] = []
    for _ in range(load.calls):
        start = random_ids(dice, load.prompt) if load.reflects else known[: load.prompt]
        known = [*start, *known[load.prompt :], *answer.ids]
        results: list[int] = []
        async with AsyncExitStack() as stack:
            feeder = Feeder(engine, known, lambda results=results: results) if is_linked else None
            if feeder is not None:
                await stack.enter_async_context(feeder)
            called = clock.now()
            for tool in load.tools:
                await clock.sleep_until(called + dice.uniform(tool.least, tool.most))
                results += random_ids(dice, tool.tokens)
            known, asked = [*known, *results], clock.now()
            stream = feeder.claim() if feeder is not None else None
            answer = await ask(engine, known, load.answer, stream)
        requests.append(AfterTools(answer.first - asked, len(known), answer.late_tokens))
    return requests


async def _send_strangers(engine: EngineClient, load: ToolAgents, dice: random.Random) -> None:
    """Send requests that nothing follows, at random times, until this is cancelled."""
    async with anyio.create_task_group() as group:
        while True:
            await clock.sleep(dice.expovariate(load.strangers))
            group.start_soon(ask, engine, random_ids(dice, load.prompt // 2), load.answer)


async def measure_alone(engine: EngineClient, tokens: int, late: int, dice: random.Random) -> float:
    """Return the seconds to the first token of one prompt on an idle engine.

    Args: late: how many of its ``tokens`` tokens are not in the cache.
    """
    await engine.flush_cache()
    prompt: Sequence[int] = random_ids(dice, tokens)
    if late < tokens:
        await ask(engine, prompt[: tokens - late], 1)
    asked = clock.now()
    return (await ask(engine, prompt, 1)).first - asked


ROLES = (Role("stock", plugin=False), Role("flashmoa", plugin=True))
# The engine's role and whether agents are linked, by way.
WAYS = {"stock": ("stock", False), "linked": ("flashmoa", True)}
WORKLOADS = ("strangers", "pressure", "parallel", "reflection")
# What was said is kept for a request if less than this part of its prompt is computed again.
_LOST = 0.5
# Requests of strangers; all agents' tokens under pressure over those of the KV pool.
_STRANGERS_PER_SECOND, _OVER = 6.0, 2.0


@dataclass(frozen=True, slots=True)
class ToolsRow:
    """One way of a workload, over its requests after tools; in seconds and tokens.

    Attributes:
        median, p90: medians over rounds of the median and of the 90th percentile to first tokens.
        of_stock: ``median`` over that of stock SGLang.
        mean: mean over all requests.
        kept: share of the requests of which less than half was computed after they had come.
        late: median number of prompt tokens that were computed after the request had come.
        computed: time to the first token, with one agent on an idle engine, if all is computed
            that can be missing on stock SGLang.
        bound: the same if nothing but the result of the last tool is left to compute.
    """

    workload: str
    way: str
    median: float
    p90: float
    of_stock: float
    mean: float
    kept: float
    late: float
    computed: float
    bound: float


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("tools", __doc__, ROLES)
    parser.add_argument(
        "--measure", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="workloads"
    )
    parser.add_argument("--agents", type=positive, default=16, help="agents under pressure")
    parser.add_argument("--prompt", type=positive, default=4000, help="tokens of first prompts")
    parser.add_argument("--answer", type=positive, default=60, help="tokens of each answer")
    parser.add_argument("--calls", type=positive, default=4, help="calls of tools by each agent")
    parser.add_argument("--result", type=positive, default=100, help="tokens of a result")
    parser.add_argument("--long-result", type=positive, default=2000, help="tokens of a long one")
    parser.add_argument(
        "--seconds", type=float, nargs=2, default=[1.0, 5.0], help="shortest and longest tool"
    )
    chosen = parser.parse_args(arguments)
    if min(chosen.seconds) <= 0:
        parser.error("--seconds must be above 0")
    anyio.run(_main, chosen)
    return 0


def workloads(arguments: argparse.Namespace) -> dict[str, ToolAgents]:
    """Return all workloads, by name."""
    least, most = arguments.seconds
    one = (Tool(least, most, arguments.result),)
    pressure = ToolAgents(
        arguments.agents, arguments.prompt, arguments.answer, arguments.calls, one
    )
    # The others find room in the same pool.
    some = replace(pressure, agents=max(1, arguments.agents // 4))
    few = replace(some, agents=max(1, arguments.agents // 8), calls=min(arguments.calls, 2))
    middle = (least + most) / 2
    two = (Tool(least, least, arguments.long_result), Tool(middle, middle, arguments.result))
    return {
        "strangers": replace(some, strangers=_STRANGERS_PER_SECOND),
        "pressure": pressure,
        "parallel": replace(few, tools=two),
        "reflection": replace(few, reflects=True),
    }


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("tools", arguments)
    loads = workloads(arguments)
    pool = int(loads["pressure"].agents * loads["pressure"].context / _OVER)
    # A modelled GPU has the pool of the GPU unless it is given.
    small = ("--max-total-tokens", str(pool)) if arguments.device else ()
    roles = [replace(role, arguments=small) for role in ROLES]
    chosen = {name: loads[name] for name in arguments.measure}
    async with report.connect(roles, pool) as engines:
        rows = await _measure(engines, chosen, arguments, report.console)
        gave_way = sum(rank.gave_way for rank in (await engines["flashmoa"].info()).kv)
    show(rows, report.console)
    report.console.print(f"Streams gave way to requests {gave_way} times.\n")
    report.save({"rows": rows, "pool": pool, "gave_way": gave_way})


async def _measure(
    engines: Engines,
    loads: Mapping[str, ToolAgents],
    arguments: argparse.Namespace,
    console: Console,
) -> list[ToolsRow]:
    dice = random.Random(arguments.seed)

    async def run(way: str, load: ToolAgents) -> list[AfterTools]:
        role, is_linked = WAYS[way]
        return await play(engines[role], load, dice, is_linked=is_linked)

    async def alone(load: ToolAgents, late: int) -> float:
        tokens = (load.prompt + load.context) // 2
        engine = engines["flashmoa"]
        seconds = [
            await measure_alone(engine, tokens, min(late, tokens), dice)
            for _ in range(arguments.repeats)
        ]
        return median(seconds)

    rows: list[ToolsRow] = []
    with RoundPlayer(console, arguments.repeats, len(loads) * len(WAYS)) as player:
        for way in WAYS:
            await run(way, replace(next(iter(loads.values())), agents=1, calls=1))
        for name, load in loads.items():
            rounds = await player.play(list(WAYS), partial(run, load=load), name)
            bound = await alone(load, load.tools[-1].tokens)
            # Stock SGLang has what was said before parallel tools; nothing evicts that.
            computed = await alone(load, load.result if len(load.tools) > 1 else load.context)
            rows += summarise(name, rounds, computed, bound)
    return rows


def summarise(
    workload: str,
    rounds: Mapping[str, Sequence[Sequence[AfterTools]]],
    computed: float,
    bound: float,
) -> list[ToolsRow]:
    """Summarise a workload's rounds, each of which has all requests after tools."""
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
            kept=mean(each.late < _LOST * each.prompt for each in requests),
            late=median(each.late for each in requests),
            computed=computed,
            bound=bound,
        )
        rows.append(row)
    return rows


def show(rows: Sequence[ToolsRow], console: Console) -> None:
    title = "Time to the first token after tools, ms"
    names = "", "p50", "of stock", "p90", "mean", "kept", "late", "computed", "bound"
    table = make_table(title, "workload", *names, left=("workload", ""))
    for row in rows:
        table.add_row(
            row.workload,
            row.way,
            f"{row.median * 1000:.1f}",
            f"{row.of_stock:.2f}x",
            *(f"{seconds * 1000:.1f}" for seconds in (row.p90, row.mean)),
            f"{row.kept:.0%}",
            f"{row.late:.0f}",
            *(f"{seconds * 1000:.1f}" for seconds in (row.computed, row.bound)),
        )
    console.print(table)
    console.print(
        "kept: requests of which less than half was computed after they had come. late: tokens "
        "that were computed then, median. By itself on an idle engine, a request takes as long as "
        "*computed* if all that can be missing is computed, and as *bound* if only the result of "
        "the last tool is.\n",
        highlight=False,
    )
