"""A KV pool too small for its streams: what linking costs where memory is short.

Stream2LLM found that naive streaming makes tails several times worse there. Pipelines with
prompts of their own, which together need more than the pool holds, on one engine: linked, and
not. The goal is a 99th percentile of at most 1.1 times.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.requests import Feeder, ask, random_ids
from flashmoa_bench.harness.rounds import alternating, percentile
from flashmoa_bench.linking.pipelines import SUFFIX_TOKENS, Pipeline, all_at_once, until

ROLES = (Role("flashmoa", plugin=True),)
_GOAL = 1.1

Way = Literal["unlinked", "linked"]
_WAYS: tuple[Way, ...] = ("unlinked", "linked")


@dataclass(frozen=True, slots=True)
class Load:
    """``over``: what the pipelines need together, over what the pool holds."""

    pipelines: int
    prefix: int
    upstream: int
    tps: float
    output: int
    over: float

    @property
    def pool_tokens(self) -> int:
        each = self.prefix + self.upstream + SUFFIX_TOKENS + self.output
        return int(self.pipelines * each / self.over)


@dataclass(frozen=True, slots=True)
class Tail:
    """Seconds from A's first token to B's last, over all pipelines and rounds."""

    median: float
    p99: float


def main(arguments: Sequence[str]) -> int:
    """``flashmoa bench pressure``; returns the exit status."""
    parser = command_line("pressure", __doc__, ROLES)
    parser.add_argument("--pipelines", type=positive, default=32)
    parser.add_argument("--prefix", type=positive, default=400, help="tokens of each, known")
    parser.add_argument("--upstream", type=positive, default=64, help="tokens of each upstream")
    parser.add_argument("--tps", type=float, default=25.0, help="tokens per second of each")
    parser.add_argument("--output", type=positive, default=16, help="tokens of each answer")
    parser.add_argument("--over", type=float, default=2.0, help="oversubscription of the pool")
    chosen = parser.parse_args(arguments)
    if chosen.over <= 0 or chosen.tps <= 0:
        parser.error("--over and --tps must be above 0")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    load = Load(
        arguments.pipelines,
        arguments.prefix,
        arguments.upstream,
        arguments.tps,
        arguments.output,
        arguments.over,
    )
    report = Report("pressure", arguments)
    async with connected(ROLES, arguments, load.pool_tokens, console) as engines:
        await report.describe(engines)
        report.head(console)
        seconds = await _measure(engines["flashmoa"], load, arguments, console)
        kv = (await engines["flashmoa"].info()).kv
    tails = summarise(seconds)
    show(tails, sum(rank.gave_way for rank in kv), console)
    report.save(console, {way: asdict(tail) for way, tail in tails.items()})


async def _measure(
    engine: EngineClient, load: Load, arguments: argparse.Namespace, console: Console
) -> dict[Way, list[float]]:
    dice = random.Random(arguments.seed)
    seconds: dict[Way, list[float]] = {way: [] for way in _WAYS}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=arguments.repeats * len(_WAYS))
        await _round(engine, load, dice, "linked")
        for way in alternating(arguments.repeats, _WAYS):
            bars.update(bar, description=way)
            seconds[way] += await _round(engine, load, dice, way)
            bars.advance(bar)
    return seconds


async def _round(engine: EngineClient, load: Load, dice: random.Random, way: Way) -> list[float]:
    """Pipelines that start one after another, evenly over the time one upstream writes."""
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


def summarise(seconds: Mapping[Way, Sequence[float]]) -> dict[Way, Tail]:
    return {way: Tail(median(values), percentile(values, 0.99)) for way, values in seconds.items()}


def show(tails: Mapping[Way, Tail], gave_way: int, console: Console) -> None:
    """Print the table."""
    table = Table(title="A pool too small for its streams", title_justify="left")
    for name in ("", "median", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for way, tail in tails.items():
        table.add_row(way, f"{tail.median:.2f} s", f"{tail.p99:.2f} s")
    base, linked = tails["unlinked"], tails["linked"]
    table.add_row("ratio", f"{linked.median / base.median:.2f}x", f"{linked.p99 / base.p99:.2f}x")
    console.print(table)
    console.print(f"Goal: p99 at most {_GOAL}x. Streams gave way {gave_way} times.\n")
