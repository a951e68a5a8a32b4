"""Measure what FlashMoA's prompt streams cost a request that belongs to no workflow.

It decodes beside workflows on stock SGLang, and beside the same workflows with the plugin, unlinked
and linked.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# Tokens of each pipeline's answer, tokens per second of an upstream agent, and the number of these
# agents that write at the same time.
_OUTPUT_TOKENS, _TPS, _AT_ONCE = 32, 50.0, 8
# Answers of a stranger that has the engine to itself.
_ANSWERS_ALONE = 3


@dataclass(frozen=True, slots=True)
class Load:
    """Describes pipelines that arrive one after another, evenly.

    Attributes:
        pipelines: number of pipelines in all.
        prefix, upstream: tokens of each pipeline's prefix and upstream agent; no two pipelines
            share any.
        tokens: tokens of each of the stranger's answers.
    """

    pipelines: int
    prefix: int
    upstream: int
    tokens: int

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of KV that the pipelines and the stranger need."""
        each = self.prefix + self.upstream + SUFFIX_TOKENS + _OUTPUT_TOKENS
        return _AT_ONCE * each + _PROMPT_TOKENS + self.tokens

    def make_pipelines(self, dice: random.Random, started: float) -> list[Pipeline]:
        """Make the pipelines, of which the first starts at ``started``."""
        spread = self.upstream / _TPS / _AT_ONCE
        return [
            Pipeline(
                prefix=random_ids(dice, self.prefix),
                upstream=random_ids(dice, self.upstream),
                suffix=random_ids(dice, SUFFIX_TOKENS),
                tps=_TPS,
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
    run = partial(_run_pipeline, engine, linked=linked)
    seconds: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        if busy:
            seconds = await run_concurrently(run, pipelines)
        is_over = busy
    return LoadRound(answers, completions, seconds)


async def _run_pipeline(engine: EngineClient, pipeline: Pipeline, *, linked: bool) -> float:
    """Return the seconds from the pipeline's start to B's last token."""
    await clock.sleep_until(pipeline.started)
    if not linked:
        await clock.sleep_until(pipeline.end)
        return (await ask(engine, pipeline.prompt, _OUTPUT_TOKENS)).last - pipeline.started
    async with Feeder(engine, pipeline.prefix, pipeline.written) as feeder:
        await clock.sleep_until(pipeline.end)
        answer = await ask(engine, pipeline.prompt, _OUTPUT_TOKENS, feeder.claim())
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


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("interference", __doc__, ROLES)
    parser.add_argument("--pipelines", type=positive, default=32, help="pipelines of a round")
    parser.add_argument("--prefix", type=positive, default=2000, help="tokens known of each")
    parser.add_argument("--upstream", type=positive, default=100, help="tokens of each upstream")
    parser.add_argument("--tokens", type=positive, default=128, help="of a stranger's answer")
    add_stock_forwards(parser, [512])
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("interference", arguments)
    load = Load(arguments.pipelines, arguments.prefix, arguments.upstream, arguments.tokens)
    roles = [*ROLES, *mixed_roles(arguments.stock_forwards).values()]
    async with report.connect(roles, load.pool_tokens + 4096) as engines:
        results = await measure(engines, load, arguments, report.console)
    report.save({"latency": results})
