"""Measure streaming and shortest-job-first together (FlashAgents §6.6, Figure 9).

Workflows of three agents with known lengths run on one engine, which runs few requests at a time,
so that a queue forms. Workflow latency is measured with stock SGLang in order of arrival (FCFS),
also with mixed chunks of other sizes, and with FlashMoA's shortest-job-first, its links and both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import mean, median
from typing import Annotated

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import (
    Option,
    command,
    mixed_roles,
    positive,
    stock_forwards,
)
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.requests import TimedAnswer, ask, feeding, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, percentile, run_concurrently
from flashmoa_bench.link.pipelines import SUFFIX_TOKENS


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """The tokens of an agent's fixed prefix and of its output."""

    prefix: int
    output: int


WorkflowKind = tuple[AgentProfile, ...]
Kinds = Sequence[WorkflowKind]
# The kinds differ in length, so that one job is the shortest.
KINDS: tuple[WorkflowKind, ...] = (
    (AgentProfile(96, 16), AgentProfile(192, 8), AgentProfile(128, 16)),
    (AgentProfile(256, 32), AgentProfile(384, 16), AgentProfile(512, 24)),
    (AgentProfile(384, 64), AgentProfile(768, 32), AgentProfile(512, 48)),
)


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call for ``output`` tokens; its prompt is ``prefix`` + the previous answer + ``suffix``."""

    prefix: list[int]
    suffix: list[int]
    output: int


WorkflowCalls = tuple[AgentCall, ...]


def scale_kinds(factor: int) -> Kinds:
    """Multiply all lengths of the workflows by ``factor``."""
    return [
        tuple(AgentProfile(factor * agent.prefix, factor * agent.output) for agent in kind)
        for kind in KINDS
    ]


def make_batches(
    count: int, dice: random.Random, kinds: Kinds = KINDS, *, shared: bool
) -> list[list[WorkflowCalls]]:
    """Make batches of ``count`` workflows each, and enough batches for all kinds."""
    batch_count = max(1, -(-len(kinds) // count))
    workflows = make_workflows(count * batch_count, dice, kinds, shared=shared)
    return [workflows[i : i + count] for i in range(0, len(workflows), count)]


def make_workflows(
    count: int, dice: random.Random, kinds: Kinds = KINDS, *, shared: bool
) -> list[WorkflowCalls]:
    """Make ``count`` workflows with fresh tokens, of the kinds in turn.

    Args:
        shared: whether workflows of a kind share their agents' prefixes.
    """
    prefixes_of_kinds = [_make_prefixes(kind, dice) for kind in kinds]
    workflows: list[WorkflowCalls] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        prefixes = prefixes_of_kinds[number % len(kinds)] if shared else _make_prefixes(kind, dice)
        task = random_ids(dice, 32)
        calls = [
            AgentCall(prefix, random_ids(dice, SUFFIX_TOKENS), agent.output)
            for prefix, agent in zip(prefixes, kind, strict=True)
        ]
        first = AgentCall([*calls[0].prefix, *task], calls[0].suffix, calls[0].output)
        workflows.append((first, *calls[1:]))
    return workflows


def _make_prefixes(kind: WorkflowKind, dice: random.Random) -> list[list[int]]:
    return [random_ids(dice, agent.prefix) for agent in kind]


def pool_tokens(count: int, kinds: Kinds) -> int:
    """Return the largest number of KV tokens that ``count`` workflows at once need."""
    most = max(sum(agent.prefix + 2 * agent.output + 64 for agent in kind) for kind in kinds)
    return 4096 + count * most


async def play(
    engine: EngineClient, batch: Sequence[WorkflowCalls], *, linked: bool
) -> list[float]:
    """Play all workflows at once on an empty cache; return each one's seconds to its last token."""
    await engine.flush_cache()
    started = clock.now()

    async def run(workflow: WorkflowCalls) -> float:
        await _run(engine, workflow, linked)
        return clock.now() - started

    return await run_concurrently(run, batch)


async def _run(engine: EngineClient, workflow: WorkflowCalls, linked: bool) -> None:
    """Run a workflow. If it is linked, the later agents' streams open at the start."""
    before, answers = TimedAnswer(), [TimedAnswer() for _ in workflow]
    async with AsyncExitStack() as stack:
        claims: list[Callable[[], str | None]] = [lambda: None]
        for answer, call in zip(answers, workflow[1:], strict=False):
            stream = feeding(
                engine,
                call.prefix,
                lambda answer=answer: answer.ids,
                expected_output_tokens=call.output,
                is_linked=linked,
            )
            claims.append(await stack.enter_async_context(stream))
        for call, answer, claim in zip(workflow, answers, claims, strict=True):
            prompt = [*call.prefix, *before.ids, *call.suffix]
            before = await ask(engine, prompt, call.output, claim(), answer)


ROLES = (
    Role("stock", plugin=False, arguments=("--schedule-policy", "fcfs")),
    Role("flashmoa", plugin=True, arguments=("--flashmoa-schedule", "sglang")),
    Role("sjf", plugin=True, arguments=("--flashmoa-schedule", "sjf")),
)
FCFS = "fcfs"
# The engine's role, and whether the agents are linked, by way.
_WAYS = {
    FCFS: ("stock", False),
    "sjf": ("sjf", False),
    "linked": ("flashmoa", True),
    "linked + sjf": ("sjf", True),
}
# Latency over FCFS's in Figure 9, by concurrency. The paper's text gives one figure of the first
# two ways for both concurrencies.
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
        mean_of_fcfs, p95_of_fcfs: over stock FCFS's at this concurrency.
    """

    concurrency: Annotated[int, Column("C")]
    way: Annotated[str, Column("")]
    mean: Annotated[float, Column("mean", "{:.2f}")]
    mean_of_fcfs: Annotated[float, Column("of fcfs", "{:.2f}")]
    p95: Annotated[float, Column("p95", "{:.2f}")]
    p95_of_fcfs: Annotated[float, Column("of fcfs", "{:.2f}")]

    @property
    def paper(self) -> Annotated[str, Column("paper")]:
        return PAPER.get(self.way, {}).get(self.concurrency, "")


async def _measure(report: Report) -> None:
    options = report.options
    limit = ("--max-running-requests", str(options.max_running_requests))
    mixed = mixed_roles(options.stock_forwards, *ROLES[0].arguments)
    roles = [
        replace(role, arguments=(*role.arguments, *limit)) for role in (*ROLES, *mixed.values())
    ]
    kinds, counts = scale_kinds(options.lengths), options.concurrency
    dice, shared = random.Random(options.seed), options.prefixes == "shared"
    rows: list[ScheduleRow] = []
    async with report.connect(roles, pool_tokens(max(counts), kinds)) as engines:
        stock = {way: (role.name, False) for way, role in mixed.items() if role.name in engines}
        ways = stock | _WAYS

        async def run(way: str, count: int) -> list[float]:
            role, linked = ways[way]
            seconds: list[float] = []
            for batch in make_batches(count, dice, kinds, shared=shared):
                seconds += await play(engines[role], batch, linked=linked)
            return seconds

        with RoundPlayer(report.console, options.repeats, len(counts) * len(ways)) as player:
            for way in ways:
                await run(way, max(counts))
            for count in counts:
                play_count, label = partial(run, count=count), f"C={count}"
                rounds = await player.play(list(ways), play_count, label, warm_up=False)
                rows += summarise(count, rounds)
    report.show(
        "Workflow latency, seconds and of stock FCFS",
        rows,
        "paper: Figure 9, other workflows on A100s; it gives means only.",
    )
    report.save({"rows": rows, "kinds": kinds})


def summarise(count: int, rounds: Mapping[str, Sequence[Sequence[float]]]) -> list[ScheduleRow]:
    """Summarise each round's workflow latencies, by way; ``fcfs`` is one way."""
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


main = command(
    "schedule",
    __doc__,
    _measure,
    ROLES,
    Option("--concurrency", positive, [1, 10], "workflows at once"),
    Option("--max-running-requests", positive, 4, "limit of engines started here"),
    Option(
        "--prefixes",
        str,
        "shared",
        "whether workflows of a kind share their agents' fixed prefixes",
        choices=("shared", "own"),
    ),
    Option("--lengths", positive, 1, "factor; with 5, prompts are as long as the paper's"),
    stock_forwards(256, 1024),
)
