"""A KV pool too small for its streams: what linking costs where memory is short.

Stream2LLM found that naive streaming makes tails several times worse there. Pipelines with
prompts of their own, which together need more than the pool holds, on one engine: linked, and
not. The goal is a 99th percentile of at most 1.1 times.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import progress
from flashmoa_bench.harness.requests import Feeder, ask, random_ids
from flashmoa_bench.harness.rounds import alternating, percentile
from flashmoa_bench.linking.pipelines import SUFFIX_TOKENS, Pipeline, all_at_once, until

GOAL_P99 = 1.1

PressureWay = Literal["unlinked", "linked"]
_WAYS: tuple[PressureWay, ...] = ("unlinked", "linked")


@dataclass(frozen=True, slots=True)
class PressureLoad:
    """Pipelines at once, and tokens of each.

    Attributes:
        tps: tokens per second of each upstream agent.
        over: what the pipelines need together, over what the pool holds.
    """

    pipelines: int
    prefix: int
    upstream: int
    tps: float
    output: int
    over: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> PressureLoad:
        """Return what the command line asks for."""
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
        """Return the size of a KV pool that is too small for them."""
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
    load, dice = PressureLoad.of(arguments), random.Random(arguments.seed)
    seconds: dict[PressureWay, list[float]] = {way: [] for way in _WAYS}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=arguments.repeats * len(_WAYS))
        await _round(engine, load, dice, "linked")
        for way in alternating(arguments.repeats, _WAYS):
            bars.update(bar, description=f"pressure {way}")
            seconds[way] += await _round(engine, load, dice, way)
            bars.advance(bar)
    tails: dict[PressureWay, Tail] = {
        way: Tail(median(one), percentile(one, 0.99)) for way, one in seconds.items()
    }
    show(tails, sum(rank.gave_way for rank in (await engine.info()).kv), console)
    return {way: asdict(tail) for way, tail in tails.items()}


async def _round(
    engine: EngineClient, load: PressureLoad, dice: random.Random, way: PressureWay
) -> list[float]:
    """Play pipelines that start one after another, evenly over the time one upstream writes."""
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

    async def one(pipeline: Pipeline) -> float:
        await until(pipeline.started)
        if way == "unlinked":
            await until(pipeline.end)
            return (await ask(engine, pipeline.prompt, load.output)).last - pipeline.started
        async with Feeder(engine, pipeline.prefix, pipeline.written) as feeder:
            await until(pipeline.end)
            answer = await ask(engine, pipeline.prompt, load.output, feeder.take_over())
            return answer.last - pipeline.started

    return await all_at_once(one, pipelines)


def show(tails: Mapping[PressureWay, Tail], gave_way: int, console: Console) -> None:
    """Print the table."""
    table = Table(title="A pool too small for its streams", title_justify="left")
    for name in ("", "median", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for way, tail in tails.items():
        table.add_row(way, f"{tail.median:.2f} s", f"{tail.p99:.2f} s")
    base, linked = tails["unlinked"], tails["linked"]
    table.add_row("ratio", f"{linked.median / base.median:.2f}x", f"{linked.p99 / base.p99:.2f}x")
    console.print(table)
    console.print(f"Goal: p99 at most {GOAL_P99}x. Streams gave way {gave_way} times.\n")
