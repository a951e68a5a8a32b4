"""Measure what linking costs when the KV pool is too small for the streams.

Stream2LLM found that naive streaming then makes tail latencies several times worse. Here pipelines
that share nothing, and together need more than the pool holds, run on one engine, linked and
unlinked. The goal is a 99th percentile of at most 1.1 times the unlinked one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any, Literal

from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.harness.requests import Feeder, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, percentile, run_concurrently
from flashmoa_bench.linking.pipelines import SUFFIX_TOKENS, Pipeline, sleep_until

GOAL_P99 = 1.1

PressureWay = Literal["unlinked", "linked"]
_WAYS: tuple[PressureWay, ...] = ("unlinked", "linked")


@dataclass(frozen=True, slots=True)
class PressureLoad:
    """Describes ``pipelines`` pipelines that run at once.

    Attributes:
        prefix, upstream, output: tokens of each pipeline's prefix, upstream agent and answer.
        tps: tokens per second of each upstream agent.
        over: tokens that the pipelines need together, over those that the pool holds.
    """

    pipelines: int
    prefix: int
    upstream: int
    tps: float
    output: int
    over: float

    @classmethod
    def from_options(cls, arguments: argparse.Namespace) -> PressureLoad:
        """Return the load that the command line asks for."""
        return cls(
            arguments.pipelines,
            arguments.prefix,
            arguments.upstream,
            arguments.tps,
            arguments.output,
            arguments.over,
        )

    @property
    def pool_tokens(self) -> int:
        """Return the size of a KV pool that is too small for them, in tokens."""
        each = self.prefix + self.upstream + SUFFIX_TOKENS + self.output
        return int(self.pipelines * each / self.over)


@dataclass(frozen=True, slots=True)
class Tail:
    """Seconds from A's first token to B's last, over all pipelines and rounds."""

    median: float
    p99: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part; ``--prefix`` and ``--tps`` come with the benchmark."""
    group = parser.add_argument_group("pressure")
    group.add_argument("--pipelines", type=positive, default=32)
    group.add_argument("--upstream", type=positive, default=64, help="tokens of each upstream")
    group.add_argument("--output", type=positive, default=16, help="tokens of each answer")
    group.add_argument("--over", type=float, default=2.0, help="oversubscription of the pool")


async def measure(
    engine: EngineClient, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Measure, print the table, and return the result for the report."""
    load, dice = PressureLoad.from_options(arguments), random.Random(arguments.seed)

    async def run(way: PressureWay) -> list[float]:
        return await _play_round(engine, load, dice, way)

    with RoundPlayer(console, arguments.repeats, len(_WAYS)) as player:
        await run("linked")
        rounds = await player.play(_WAYS, run, "pressure")
    tails: dict[PressureWay, Tail] = {}
    for way, each in rounds.items():
        seconds = list(chain.from_iterable(each))
        tails[way] = Tail(median(seconds), percentile(seconds, 0.99))
    show(tails, sum(rank.gave_way for rank in (await engine.info()).kv), console)
    return {way: asdict(tail) for way, tail in tails.items()}


async def _play_round(
    engine: EngineClient, load: PressureLoad, dice: random.Random, way: PressureWay
) -> list[float]:
    """Play pipelines that start one after another, spread over the time of one upstream agent.

    Returns: the seconds from each pipeline's start to B's last token.
    """
    await engine.flush_cache()
    begin = time.perf_counter()
    spread = load.upstream / load.tps / load.pipelines
    pipelines = [
        Pipeline(
            prefix=random_ids(dice, load.prefix),
            upstream=random_ids(dice, load.upstream),
            suffix=random_ids(dice, SUFFIX_TOKENS),
            tps=load.tps,
            started=begin + number * spread,
        )
        for number in range(load.pipelines)
    ]

    async def run(pipeline: Pipeline) -> float:
        await sleep_until(pipeline.started)
        if way == "unlinked":
            await sleep_until(pipeline.end)
            return (await ask(engine, pipeline.prompt, load.output)).last - pipeline.started
        async with Feeder(engine, pipeline.prefix, pipeline.written) as feeder:
            await sleep_until(pipeline.end)
            answer = await ask(engine, pipeline.prompt, load.output, feeder.claim())
            return answer.last - pipeline.started

    return await run_concurrently(run, pipelines)


def show(tails: Mapping[PressureWay, Tail], gave_way: int, console: Console) -> None:
    """Print the table."""
    table = make_table("A pool too small for its streams", "", "median", "p99")
    for way, tail in tails.items():
        table.add_row(way, f"{tail.median:.2f} s", f"{tail.p99:.2f} s")
    base, linked = tails["unlinked"], tails["linked"]
    table.add_row("ratio", f"{linked.median / base.median:.2f}x", f"{linked.p99 / base.p99:.2f}x")
    console.print(table)
    console.print(f"Goal: p99 at most {GOAL_P99}x. Streams gave way {gave_way} times.\n")
