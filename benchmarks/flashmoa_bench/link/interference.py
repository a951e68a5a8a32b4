"""Measure what FlashMoA's prompt streams cost a request that belongs to no workflow.

This stranger decodes beside workflows: on stock SGLang, and with the plugin, unlinked and linked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean, median
from typing import Annotated

import anyio

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
from flashmoa_bench.harness.requests import TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, gaps, percentile, run_concurrently
from flashmoa_bench.link.pipelines import SUFFIX_TOKENS, Pipeline, ask_downstream

STOCK = "stock"
ROLES = (Role(STOCK, plugin=False), Role("flashmoa", plugin=True))
# For each way: the engine's role, whether there are pipelines, and whether they are linked.
_WAYS = {
    "unlinked": ("flashmoa", True, False),
    "linked": ("flashmoa", True, True),
    "alone": ("flashmoa", False, False),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Pipelines that arrive one after another at equal intervals, and a stranger.

    Attributes:
        prefix, upstream, answer: tokens of each pipeline's prefix, A's answer and B's answer.
        prompt, tokens: tokens of each of the stranger's prompts and answers.
        tps: tokens per second of an upstream agent.
        at_once: number of upstream agents that write at the same time.
    """

    pipelines: int
    prefix: int
    upstream: int
    tokens: int
    prompt: int = 32
    answer: int = 32
    tps: float = 50.0
    at_once: int = 8

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of KV that the pipelines and the stranger need."""
        each = self.prefix + self.upstream + SUFFIX_TOKENS + self.answer
        return self.at_once * each + self.prompt + self.tokens

    def make_pipelines(self, dice: random.Random, started: float) -> list[Pipeline]:
        """Make the pipelines; the first starts at ``started``."""
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
    """One round: the stranger's answers, and the seconds of its answers and of the pipelines."""

    answers: Sequence[TimedAnswer]
    completions: Sequence[float]
    pipelines: Sequence[float]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """One way's figures, in seconds; over all rounds together.

    ``completion_mean`` matters, because a round has few answers, under different loads.
    """

    way: Annotated[str, Column("")]
    gap: Annotated[float, Column("gap p50, ms", "{:.1f}", 1000)]
    gap_p99: Annotated[float, Column("gap p99, ms", "{:.1f}", 1000)]
    longest_gap: Annotated[float, Column("longest", "{:.1f}", 1000)]
    completion: Annotated[float, Column("answer p50, s", "{:.2f}")]
    completion_p99: Annotated[float, Column("p99", "{:.2f}")]
    completion_mean: Annotated[float, Column("mean", "{:.2f}")]
    answers: int
    pipeline: Annotated[float | None, Column("pipeline p50, s", "{:.2f}")]
    pipeline_p99: Annotated[float | None, Column("p99", "{:.2f}")]
    of_stock: Annotated[Mapping[str, float], Column("{} of stock", "{:.2f}x")]


async def _measure(report: Report) -> None:
    options = report.options
    load = Load(options.pipelines, options.prefix, options.upstream, options.tokens)
    mixed = mixed_roles(options.stock_forwards)
    async with report.connect([*ROLES, *mixed.values()], load.pool_tokens + 4096) as engines:
        dice = random.Random(options.seed)
        named = {STOCK: ROLES[0], **mixed}
        stock = {way: (r.name, True, False) for way, r in named.items() if r.name in engines}
        ways = stock | _WAYS

        async def run(way: str) -> LoadRound:
            role, busy, linked = ways[way]
            return await _play(engines[role], load, dice, busy=busy, linked=linked)

        with RoundPlayer(report.console, options.repeats, len(ways)) as player:
            rounds = await player.play(list(ways), run, "pipelines")
        gave_way = sum(rank.gave_way for rank in (await engines["flashmoa"].info()).kv)
    figures = summarise(rounds)
    report.show(
        "A stranger beside pipelines, and the pipelines",
        figures,
        "stock, unlinked, linked: under the same pipelines; alone: without them; stock mixed N: "
        "with --enable-mixed-chunk --chunked-prefill-size N. gap: between two tokens of the "
        "stranger (goal for linked: p99 <= 1.25x); answer: from its request to its last token; "
        "pipeline: from A's first token to B's last (goal: p99 <= 1.1x).",
    )
    report.console.print(f"Streams gave way to requests {gave_way} times.\n")
    by_way = {each.way: each for each in figures}
    report.save({"latency": {**by_way, "gave_way": gave_way}})


async def _play(
    engine: EngineClient, load: Load, dice: random.Random, *, busy: bool, linked: bool
) -> LoadRound:
    """Play one round on an empty cache: if ``busy`` with the pipelines, else the stranger alone."""
    await engine.flush_cache()
    answers: list[TimedAnswer] = []
    completions: list[float] = []
    is_over = False

    async def decode() -> None:
        while not is_over and (busy or len(answers) < 3):
            asked = clock.now()
            answers.append(await ask(engine, random_ids(dice, load.prompt), load.tokens))
            completions.append(answers[-1].last - asked)

    async def run(pipeline: Pipeline) -> float:
        await clock.sleep_until(pipeline.started)
        answer = await ask_downstream(engine, pipeline, load.answer, linked=linked)
        return answer.last - pipeline.started

    pipelines = load.make_pipelines(dice, clock.now()) if busy else []
    seconds: list[float] = []
    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        if busy:
            seconds = await run_concurrently(run, pipelines)
        is_over = busy
    return LoadRound(answers, completions, seconds)


def summarise(rounds: Mapping[str, Sequence[LoadRound]]) -> list[Neighbours]:
    """Summarise the rounds of each way, ``stock`` among them."""
    found = [_summarise_way(way, each) for way, each in rounds.items()]
    stock = next(each for each in found if each.way == STOCK)
    return [replace(each, of_stock=_compare(each, stock)) for each in found]


def _summarise_way(way: str, rounds: Sequence[LoadRound]) -> Neighbours:
    between = [gap for each in rounds for answer in each.answers for gap in gaps(answer.times)]
    completions = list(chain.from_iterable(each.completions for each in rounds))
    pipelines = list(chain.from_iterable(each.pipelines for each in rounds))
    return Neighbours(
        way,
        gap=median(between),
        gap_p99=percentile(between, 0.99),
        longest_gap=max(between),
        completion=median(completions),
        completion_p99=percentile(completions, 0.99),
        completion_mean=mean(completions),
        answers=len(completions),
        pipeline=median(pipelines) if pipelines else None,
        pipeline_p99=percentile(pipelines, 0.99) if pipelines else None,
        of_stock={},
    )


def _compare(one: Neighbours, stock: Neighbours) -> dict[str, float]:
    pairs = {
        "gap": (one.gap, stock.gap),
        "gap p99": (one.gap_p99, stock.gap_p99),
        "answer": (one.completion_mean, stock.completion_mean),
        "pipeline": (one.pipeline, stock.pipeline),
        "pipeline p99": (one.pipeline_p99, stock.pipeline_p99),
    }
    return {name: own / base for name, (own, base) in pairs.items() if own and base}


main = command(
    "interference",
    __doc__,
    _measure,
    ROLES,
    Option("--pipelines", positive, 32, "pipelines of a round"),
    Option("--prefix", positive, 2000, "tokens known of each"),
    Option("--upstream", positive, 100, "tokens of each upstream"),
    Option("--tokens", positive, 128, "of a stranger's answer"),
    stock_forwards(512),
)
