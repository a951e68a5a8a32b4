"""Streaming and shortest-job-first together (FlashAgents §6.6, Figure 9).

Workflows of three agents whose lengths are known, all on one engine that runs few requests
at a time, so that there is a queue: stock SGLang in order of arrival, FlashMoA's
shortest-job-first, its links, and both. Workflow latency over that of stock FCFS.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from statistics import mean, median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import alternating, percentile

_TASK_TOKENS = 32
_SUFFIX_TOKENS = 10
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
class AgentProfile:
    """What is known of an agent from profiling: tokens of its fixed prefix, of its output."""

    prefix: int
    output: int


Kind = tuple[AgentProfile, ...]
# Three kinds of different length, so that there is a shortest job to put first.
KINDS: tuple[Kind, ...] = (
    (AgentProfile(96, 16), AgentProfile(192, 8), AgentProfile(128, 16)),
    (AgentProfile(256, 32), AgentProfile(384, 16), AgentProfile(512, 24)),
    (AgentProfile(384, 64), AgentProfile(768, 32), AgentProfile(512, 48)),
)


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One agent's call: its prompt is ``prefix`` + what the agent before wrote + ``suffix``."""

    prefix: list[int]
    suffix: list[int]
    output: int


Job = tuple[AgentCall, ...]


@dataclass(frozen=True, slots=True)
class ScheduleRow:
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
    """Run ``flashmoa bench schedule``; return the exit status."""
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
    """Return workflow latencies by concurrency, way and round."""
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


def batches(count: int, dice: random.Random, *, shared: bool) -> list[list[Job]]:
    """Make ``count`` workflows at once, as often as it takes for every kind to occur."""
    times = max(1, -(-len(KINDS) // count))
    all_of_them = workflows(count * times, dice, shared=shared)
    return [all_of_them[i : i + count] for i in range(0, len(all_of_them), count)]


async def play_all(
    engine: EngineClient, batches: Sequence[Sequence[Job]], *, linked: bool
) -> list[float]:
    """Play the batches one after the other; return each workflow's seconds."""
    seconds: list[float] = []
    for batch in batches:
        seconds += await play(engine, batch, linked=linked)
    return seconds


def summarise(count: int, rounds: Mapping[str, Sequence[Sequence[float]]]) -> list[ScheduleRow]:
    """Summarise ``rounds``: by way, each round's workflow latencies; ``fcfs`` among them."""
    means = {way: median(mean(one) for one in group) for way, group in rounds.items()}
    tails = {
        way: percentile([seconds for one in group for seconds in one], 0.95)
        for way, group in rounds.items()
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


def workflows(count: int, dice: random.Random, *, shared: bool) -> list[Job]:
    """Make ``count`` workflows with fresh tokens, the kinds in turn.

    Args:
        shared: workflows of a kind have the same prefixes, as agents of one role do; else
            every workflow has its own.
    """
    fixed = [_prefixes(kind, dice) for kind in KINDS]
    made: list[Job] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        prefixes = fixed[number % len(KINDS)] if shared else _prefixes(kind, dice)
        task = random_ids(dice, _TASK_TOKENS)
        steps = [
            AgentCall(prefix, random_ids(dice, _SUFFIX_TOKENS), agent.output)
            for prefix, agent in zip(prefixes, kind, strict=True)
        ]
        first = AgentCall([*steps[0].prefix, *task], steps[0].suffix, steps[0].output)
        made.append((first, *steps[1:]))
    return made


def _prefixes(kind: Kind, dice: random.Random) -> list[list[int]]:
    return [random_ids(dice, agent.prefix) for agent in kind]


def pool_tokens(count: int) -> int:
    """Return the KV that ``count`` workflows at once can need at most."""
    most = max(sum(agent.prefix + 2 * agent.output + 64 for agent in kind) for kind in KINDS)
    return 4096 + count * most


async def play(engine: EngineClient, batch: Sequence[Job], *, linked: bool) -> list[float]:
    """Play all workflows at once on an empty cache; return the seconds to each one's last token."""
    await engine.flush_cache()
    seconds = [0.0] * len(batch)
    started = time.perf_counter()

    async def one(place: int) -> None:
        run = _linked if linked else _sequential
        await run(engine, batch[place])
        seconds[place] = time.perf_counter() - started

    async with anyio.create_task_group() as group:
        for place in range(len(batch)):
            group.start_soon(one, place)
    return seconds


async def _sequential(engine: EngineClient, workflow: Job) -> None:
    before = TimedAnswer()
    for step in workflow:
        before = await ask(engine, [*step.prefix, *before.ids, *step.suffix], step.output)


async def _linked(engine: EngineClient, workflow: Job) -> None:
    """Open the later agents' streams at the start, and feed them what is being written."""
    answers = [TimedAnswer() for _ in workflow]
    async with AsyncExitStack() as stack:
        feeders: list[Feeder | None] = [None]
        for before, step in zip(answers, workflow[1:], strict=False):
            feeder = Feeder(engine, step.prefix, _written(before))
            feeders.append(await stack.enter_async_context(feeder))
        before = TimedAnswer()
        for step, answer, feeder in zip(workflow, answers, feeders, strict=True):
            prompt = [*step.prefix, *before.ids, *step.suffix]
            stream = feeder.take_over() if feeder is not None else None
            await ask(engine, prompt, step.output, stream, answer)
            before = answer


def _written(answer: TimedAnswer) -> Callable[[], Sequence[int]]:
    return lambda: answer.ids
