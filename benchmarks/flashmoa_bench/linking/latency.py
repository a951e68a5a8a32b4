"""A request that decodes while prompt streams fill on the same engine: the time between tokens."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import progress
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import alternating, gaps, percentile

GOAL_P99 = 1.25
_PROMPT_TOKENS = 32
# Streams are fed for at most so long; the KV pool has room for that.
_FED_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Streams:
    """How many fill, tokens known of each, and tokens per second that each gets on top."""

    count: int
    prefix: int
    tps: float


@dataclass(frozen=True, slots=True)
class DecodedBeside:
    """One round: seconds between a request's tokens, and stream tokens prefilled per second."""

    gaps: tuple[float, ...]
    stream_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class TokenLatency:
    """Seconds between tokens; medians over rounds of each round's figure."""

    median: float
    p99: float
    longest: float
    stream_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LatencyBesideStreams:
    """A request alone and beside streams; ratios: beside over alone."""

    alone: TokenLatency
    beside: TokenLatency
    median_ratio: float
    p99_ratio: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part; ``--prefix`` and ``--tps`` come with the benchmark."""
    group = parser.add_argument_group("latency")
    group.add_argument("--tokens", type=positive, default=512, help="that the request decodes")
    group.add_argument("--streams", type=positive, default=8, help="that fill meanwhile")


def pool_tokens(arguments: argparse.Namespace) -> int:
    """Return the KV for the request and the streams, with what they may still receive."""
    streams: int = arguments.streams * (arguments.prefix + _most_fed(arguments.tps))
    return streams + int(arguments.tokens)


async def measure(
    engine: EngineClient, arguments: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Measure, print the table, and return the result for the report."""
    dice = random.Random(arguments.seed + 1)
    streams = {
        "alone": Streams(0, arguments.prefix, arguments.tps),
        "beside": Streams(arguments.streams, arguments.prefix, arguments.tps),
    }
    rounds: dict[str, list[DecodedBeside]] = {name: [] for name in streams}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=2 * arguments.repeats)
        await _decode_beside(engine, arguments.tokens, streams["alone"], dice)
        for name in alternating(arguments.repeats, list(rounds)):
            bars.update(bar, description=f"latency {name}")
            played = await _decode_beside(engine, arguments.tokens, streams[name], dice)
            rounds[name].append(played)
            bars.advance(bar)
    found = compare(rounds["alone"], rounds["beside"])
    show(found, console)
    return asdict(found)


async def _decode_beside(
    engine: EngineClient, tokens: int, streams: Streams, dice: random.Random
) -> DecodedBeside:
    """Decode ``tokens`` tokens beside ``streams``, on an empty cache.

    The streams are opened once the request's first token is there, and deleted after its last.
    """
    await engine.flush_cache()
    answer, over, found = TimedAnswer(), anyio.Event(), 0.0

    async def decode() -> None:
        await ask(engine, random_ids(dice, _PROMPT_TOKENS), tokens, into=answer)
        over.set()

    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        await answer.begun.wait()
        found = await _fill(engine, streams, dice, over)
    return DecodedBeside(tuple(gaps(answer.times)), found)


async def _fill(
    engine: EngineClient, streams: Streams, dice: random.Random, over: anyio.Event
) -> float:
    """Fill the streams until ``over``; return the tokens prefilled per second, of all of them."""
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        feeders: list[Feeder] = []
        for _ in range(streams.count):
            known = random_ids(dice, streams.prefix)
            more = random_ids(dice, _most_fed(streams.tps))
            feeder = Feeder(engine, known, _paced(more, streams.tps, started))
            feeders.append(await stack.enter_async_context(feeder))
        await over.wait()
        seconds, prefilled = time.perf_counter() - started, 0
        for feeder in feeders:
            if feeder.stream_id is not None:
                prefilled += (await engine.stream_state(feeder.stream_id)).prefilled_tokens
    return prefilled / seconds


def _most_fed(tps: float) -> int:
    """Return the tokens that a stream gets at most beyond its prefix."""
    return int(tps * _FED_SECONDS)


def _paced(text: list[int], tps: float, started: float) -> Callable[[], Sequence[int]]:
    return lambda: text[: int((time.perf_counter() - started) * tps)]


def compare(
    alone: Sequence[DecodedBeside], beside: Sequence[DecodedBeside]
) -> LatencyBesideStreams:
    """Compare the rounds alone with those beside streams."""
    before, after = _latency(alone), _latency(beside)
    return LatencyBesideStreams(before, after, after.median / before.median, after.p99 / before.p99)


def _latency(rounds: Sequence[DecodedBeside]) -> TokenLatency:
    return TokenLatency(
        median=median(median(one.gaps) for one in rounds),
        p99=median(percentile(one.gaps, 0.99) for one in rounds),
        longest=median(max(one.gaps) for one in rounds),
        stream_tokens_per_second=median(one.stream_tokens_per_second for one in rounds),
    )


def show(latency: LatencyBesideStreams, console: Console) -> None:
    """Print the table."""
    title = "A request's time between tokens, ms"
    table = Table(title=title, title_justify="left")
    for name in ("", "median", "p99", "longest", "stream tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in (("alone", latency.alone), ("beside streams", latency.beside)):
        times = (figures.median, figures.p99, figures.longest)
        cells = [f"{value * 1000:.1f}" for value in times]
        table.add_row(name, *cells, f"{figures.stream_tokens_per_second:.0f}")
    ratios = [f"{latency.median_ratio:.2f}x", f"{latency.p99_ratio:.2f}x (goal <= {GOAL_P99}x)"]
    table.add_row("ratio", *ratios, "", "")
    console.print(table)
