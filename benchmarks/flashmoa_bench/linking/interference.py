"""Measure what FlashMoA's plugin and its prompt streams cost other requests.

*Throughput*: the same mix of requests on stock SGLang and on an engine with the plugin and no
stream open. *Latency*: a request that belongs to no workflow, beside workflows on stock SGLang, and
beside the same workflows with the plugin, unlinked and linked.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from statistics import mean, median
from typing import Any

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import (
    add_stock_forwards,
    make_parser,
    mixed_roles,
    positive,
)
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, gaps, percentile, run_concurrently
from flashmoa_bench.linking.pipelines import SUFFIX_TOKENS, Pipeline

# Of the stranger's 99th percentile between tokens, and of the pipelines' latency, both over stock
# SGLang's.
GOAL_GAP, GOAL_PIPELINE = 1.25, 1.1
STOCK = "stock"
# The engine's role, whether there are pipelines, and whether they are linked, by way.
_WAYS = {
    "unlinked": ("flashmoa", True, False),
    "linked": ("flashmoa", True, True),
    "alone": ("flashmoa", False, False),
}
_PROMPT_TOKENS = 32
# Answers of a stranger that has the engine to itself.
_ANSWERS_ALONE = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Describes pipelines that arrive one after another, evenly.

    Attributes:
        pipelines: number of pipelines in all.
        at_once: number of pipelines whose upstream agents write at the same time.
        prefix, upstream, output: tokens of each pipeline's prefix, upstream agent and answer; no
            two pipelines share any.
        tps: tokens per second of each upstream agent.
        tokens: tokens of each of the stranger's answers.
    """

    pipelines: int
    at_once: int
    prefix: int
    upstream: int
    output: int
    tps: float
    tokens: int

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of KV that the pipelines and the stranger need."""
        each = self.prefix + self.upstream + SUFFIX_TOKENS + self.output
        return self.at_once * each + _PROMPT_TOKENS + self.tokens

    def make_pipelines(self, dice: random.Random, started: float) -> list[Pipeline]:
        """Make the pipelines, of which the first starts at ``started``."""
        spread = self.upstream / self.tps / self.at_once
        return [
            Pipeline(
                prefix=random_ids(dice, self.prefix),
                upstream=random_ids(dice, self.upstream),
                suffix=random_ids(dice, SUFFIX_TOKENS),
                tps=self.tps,
                started=started + number * spread,
            )
            for number in range(self.pipelines)
        ]


@dataclass(frozen=True, slots=True)
class LoadRound:
    """One round: the stranger's answers with their seconds, and the seconds of the pipelines."""

    answers: Sequence[TimedAnswer]
    completions: Sequence[float]
    pipelines: Sequence[float]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The figures of one way, in seconds; over all rounds together.

    Attributes:
        gap, gap_p99, longest_gap: time between two tokens of the stranger.
        completion, completion_p99: time from a request of the stranger to its last token.
        completion_mean: the mean; a round has few answers, and not all meet as many pipelines.
        answers: number of the stranger's answers.
        pipeline, pipeline_p99: time from A's first token to B's last; ``None`` without pipelines.
    """

    gap: float
    gap_p99: float
    longest_gap: float
    completion: float
    completion_p99: float
    completion_mean: float
    answers: int
    pipeline: float | None
    pipeline_p99: float | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    group = parser.add_argument_group("latency")
    group.add_argument("--pipelines", type=positive, default=32, help="pipelines of a round")
    group.add_argument(
        "--at-once", type=positive, default=8, help="upstream agents that write at once"
    )
    group.add_argument(
        "--prefix", type=positive, default=2000, help="tokens known of each pipeline"
    )
    group.add_argument("--upstream", type=positive, default=100, help="tokens of each upstream")
    group.add_argument("--output", type=positive, default=32, help="tokens of each answer")
    group.add_argument("--tps", type=float, default=50.0, help="tokens per second of an upstream")
    group.add_argument("--tokens", type=positive, default=128, help="tokens of a stranger's answer")


def load_from(arguments: argparse.Namespace) -> Load:
    """Return the load that the command line asks for."""
    return Load(**{each.name: getattr(arguments, each.name) for each in fields(Load)})


async def measure(
    engines: Engines, load: Load, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Measure, print the table, and return the result for the report."""
    dice, mixed = random.Random(arguments.seed), mixed_roles(arguments.stock_forwards)
    stock = {way: (role.name, True, False) for way, role in mixed.items() if role.name in engines}
    ways = {STOCK: ("stock", True, False), **stock, **_WAYS}

    async def run(way: str) -> LoadRound:
        role, busy, linked = ways[way]
        return await _play(engines[role], load, dice, busy=busy, linked=linked)

    with RoundPlayer(console, arguments.repeats, len(ways)) as player:
        for way in ("alone", "linked", STOCK, *stock):  # This round is not counted.
            await run(way)
        rounds = await player.play(list(ways), run, "pipelines")
    figures = {way: summarise(each) for way, each in rounds.items()}
    gave_way = sum(rank.gave_way for rank in (await engines["flashmoa"].info()).kv)
    show(figures, console)
    console.print(f"Streams gave way to requests {gave_way} times.\n")
    return {**figures, "gave_way": gave_way}


async def _play(
    engine: EngineClient, load: Load, dice: random.Random, *, busy: bool, linked: bool
) -> LoadRound:
    """Play one round on an empty cache; ``busy`` with the pipelines, else the stranger alone."""
    await engine.flush_cache()
    answers: list[TimedAnswer] = []
    completions: list[float] = []
    is_over = False

    async def decode() -> None:
        while not is_over and (busy or len(answers) < _ANSWERS_ALONE):
            asked = clock.now()
            answers.append(await ask(engine, random_ids(dice, _PROMPT_TOKENS), load.tokens))
            completions.append(answers[-1].last - asked)

    pipelines = load.make_pipelines(dice, clock.now()) if busy else []
    run = partial(_run_pipeline, engine, load.output, linked=linked)
    seconds: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        if busy:
            seconds = await run_concurrently(run, pipelines)
        is_over = busy
    return LoadRound(answers, completions, seconds)


async def _run_pipeline(
    engine: EngineClient, output: int, pipeline: Pipeline, *, linked: bool
) -> float:
    """Return the seconds from the pipeline's start to B's last token."""
    await clock.sleep_until(pipeline.started)
    if not linked:
        await clock.sleep_until(pipeline.end)
        return (await ask(engine, pipeline.prompt, output)).last - pipeline.started
    async with Feeder(engine, pipeline.prefix, pipeline.written) as feeder:
        await clock.sleep_until(pipeline.end)
        answer = await ask(engine, pipeline.prompt, output, feeder.claim())
        return answer.last - pipeline.started


def summarise(rounds: Sequence[LoadRound]) -> Neighbours:
    """Summarise the rounds of one way."""
    between = [gap for each in rounds for answer in each.answers for gap in gaps(answer.times)]
    completions = list(chain.from_iterable(each.completions for each in rounds))
    pipelines = list(chain.from_iterable(each.pipelines for each in rounds))
    return Neighbours(
        gap=median(between),
        gap_p99=percentile(between, 0.99),
        longest_gap=max(between),
        completion=median(completions),
        completion_p99=percentile(completions, 0.99),
        completion_mean=mean(completions),
        answers=len(completions),
        pipeline=median(pipelines) if pipelines else None,
        pipeline_p99=percentile(pipelines, 0.99) if pipelines else None,
    )


def show(figures: Mapping[str, Neighbours], console: Console) -> None:
    """Print the table; figures in brackets are over stock SGLang's."""
    stock = figures[STOCK]
    table = make_table(
        "A stranger beside pipelines (over stock), and the pipelines",
        *("", "gap p50, ms", "gap p99, ms", "longest", "answer mean, s", "p50", "p99"),
        *("pipeline p50, s", "pipeline p99, s"),
    )
    for way, each in figures.items():
        table.add_row(
            way,
            _format_cell(each.gap, stock.gap, 1000),
            _format_cell(each.gap_p99, stock.gap_p99, 1000),
            f"{each.longest_gap * 1000:.1f}",
            _format_cell(each.completion_mean, stock.completion_mean),
            _format_cell(each.completion, stock.completion),
            _format_cell(each.completion_p99, stock.completion_p99),
            _format_cell(each.pipeline, stock.pipeline),
            _format_cell(each.pipeline_p99, stock.pipeline_p99),
        )
    console.print(table)
    console.print(
        "stock, unlinked, linked: under the same pipelines; alone: with none; stock mixed N: with "
        "--enable-mixed-chunk --chunked-prefill-size N. gap: between two "
        f"tokens of the stranger (goal for linked: p99 <= {GOAL_GAP}x); answer: from its request "
        f"to its last token; pipeline: from A's first token to B's last (goal: p99 <= "
        f"{GOAL_PIPELINE}x).",
        highlight=False,
    )


def _format_cell(value: float | None, base: float | None, unit: float = 1) -> str:
    if value is None or base is None:
        return ""
    number = f"{value * unit:.1f}" if unit > 1 else f"{value:.2f}"
    return number if value is base else f"{number} ({value / base:.2f}x)"


ROLES = (Role("stock", plugin=False), Role("flashmoa", plugin=True))
GOAL_THROUGHPUT = 0.99
# Least and greatest number of tokens of the mix's prompts and answers.
_MIX_PROMPT = (16, 256)
_MIX_OUTPUT = (8, 48)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second, medians over rounds; ``ratios`` are plugin over stock, pair by pair."""

    stock: float
    plugin: float
    ratio: float
    ratios: tuple[float, ...]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("interference", __doc__, ROLES)
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=("throughput", "latency"),
        default=["throughput", "latency"],
    )
    mix = parser.add_argument_group("throughput")
    mix.add_argument("--requests", type=positive, default=32, help="requests of a round")
    mix.add_argument("--concurrency", type=positive, default=8, help="requests at once")
    mix.add_argument("--pairs", type=positive, default=11, help="rounds on each engine")
    add_options(parser)
    add_stock_forwards(parser, [512])
    chosen = parser.parse_args(arguments)
    if chosen.tps <= 0:
        parser.error("--tps must be above 0")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("interference", arguments)
    load = load_from(arguments)
    mix = arguments.concurrency * (_MIX_PROMPT[1] + _MIX_OUTPUT[1])
    pool = load.pool_tokens + mix + 4096
    stock = mixed_roles(arguments.stock_forwards) if "latency" in arguments.measure else {}
    roles = [*ROLES, *stock.values()]
    results: dict[str, Any] = {}
    async with report.connect(roles, pool) as engines:
        for name in arguments.measure:
            if name == "throughput":
                throughput = await _measure_throughput(engines, arguments, report.console)
                results[name] = throughput
                show_throughput(throughput, report.console)
            else:
                results[name] = await measure(engines, load, arguments, report.console)
    report.save(results)


async def _measure_throughput(
    engines: Engines, arguments: argparse.Namespace, console: Console
) -> Throughput:
    dice = random.Random(arguments.seed)
    lengths = [
        (dice.randint(*_MIX_PROMPT), dice.randint(*_MIX_OUTPUT)) for _ in range(arguments.requests)
    ]

    async def run(name: str) -> float:
        return await _play_mix(engines[name], lengths, arguments.concurrency, dice)

    names = ["stock", "flashmoa"]
    with RoundPlayer(console, arguments.pairs, len(names)) as player:
        for name in names:
            await run(name)
        rounds = await player.play(names, run, "throughput")
    return compare(rounds["stock"], rounds["flashmoa"])


async def _play_mix(
    engine: EngineClient,
    lengths: Sequence[tuple[int, int]],
    concurrency: int,
    dice: random.Random,
) -> float:
    """Play one round on an empty cache, with fresh tokens.

    Args:
        lengths: number of tokens of each request's prompt and output.

    Returns: tokens of prompt and output per second.
    """
    await engine.flush_cache()
    requests = [(random_ids(dice, prompt), output) for prompt, output in lengths]

    async def send(request: tuple[list[int], int]) -> None:
        prompt, output = request
        await ask(engine, prompt, output)

    started = clock.now()
    await run_concurrently(send, requests, concurrency)
    return sum(map(sum, lengths)) / (clock.now() - started)


def compare(stock: Sequence[float], plugin: Sequence[float]) -> Throughput:
    """Compare the rounds of both engines; each is given as tokens per second, in their order."""
    ratios = tuple(b / a for a, b in zip(stock, plugin, strict=True))
    return Throughput(median(stock), median(plugin), median(ratios), ratios)


def show_throughput(throughput: Throughput, console: Console) -> None:
    """Print the table."""
    table = make_table(
        "Throughput without streams, tokens per second",
        *("stock", "plugin", "plugin/stock", "least", "most", "goal"),
    )
    ratios = (throughput.ratio, min(throughput.ratios), max(throughput.ratios))
    rates = (throughput.stock, throughput.plugin)
    cells = (*(f"{rate:.0f}" for rate in rates), *(f"{ratio:.3f}" for ratio in ratios))
    table.add_row(*cells, f">= {GOAL_THROUGHPUT}")
    console.print(table)
    console.print("plugin/stock: median over pairs of rounds, one right after the other.\n")
