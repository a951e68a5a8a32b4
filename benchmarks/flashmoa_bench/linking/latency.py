"""Measure the time between a request's tokens while prompt streams fill on the same engine."""

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

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, gaps, percentile

GOAL_P99 = 1.25
_PROMPT_TOKENS = 32
# Streams are fed for at most this long. The KV pool has room for the tokens of that time.
_FEEDING_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams that fill: their number, and each one's known tokens and tokens per second."""

    count: int
    prefix: int
    tps: float


@dataclass(frozen=True, slots=True)
class LatencyRound:
    """One round: seconds between the request's tokens, and stream tokens prefilled per second."""

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
    """Compares a request alone with one beside streams; ratios are beside over alone."""

    alone: TokenLatency
    beside: TokenLatency
    median_ratio: float
    p99_ratio: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part; ``--prefix`` and ``--tps`` come with the benchmark."""
    group = parser.add_argument_group("latency")
    group.add_argument(
        "--tokens", type=positive, default=512, help="tokens that the request decodes"
    )
    group.add_argument(
        "--streams", type=positive, default=8, help="streams that fill while it decodes"
    )


def pool_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens of KV that the request and the streams can need."""
    streams: int = arguments.streams * (arguments.prefix + _max_fed_tokens(arguments.tps))
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

    async def run(name: str) -> LatencyRound:
        return await _decode_beside(engine, arguments.tokens, streams[name], dice)

    with RoundPlayer(console, arguments.repeats, len(streams)) as player:
        await run("alone")
        rounds = await player.play(list(streams), run, "latency")
    latency = compare(rounds["alone"], rounds["beside"])
    show(latency, console)
    return asdict(latency)


async def _decode_beside(
    engine: EngineClient, tokens: int, streams: Streams, dice: random.Random
) -> LatencyRound:
    """Decode ``tokens`` tokens while ``streams`` fill, on an empty cache.

    The streams are opened after the request's first token, and deleted after its last.
    """
    await engine.flush_cache()
    answer, is_done, stream_tps = TimedAnswer(), anyio.Event(), 0.0

    async def decode() -> None:
        await ask(engine, random_ids(dice, _PROMPT_TOKENS), tokens, into=answer)
        is_done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        await answer.has_begun.wait()
        stream_tps = await _fill(engine, streams, dice, is_done)
    return LatencyRound(tuple(gaps(answer.times)), stream_tps)


async def _fill(
    engine: EngineClient, streams: Streams, dice: random.Random, is_done: anyio.Event
) -> float:
    """Fill the streams until ``is_done`` is set.

    Returns: the tokens prefilled per second, in all streams together.
    """
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        feeders: list[Feeder] = []
        for _ in range(streams.count):
            known = random_ids(dice, streams.prefix)
            text = random_ids(dice, _max_fed_tokens(streams.tps))
            feeder = Feeder(engine, known, _make_source(text, streams.tps, started))
            feeders.append(await stack.enter_async_context(feeder))
        await is_done.wait()
        seconds, prefilled = time.perf_counter() - started, 0
        for feeder in feeders:
            if feeder.stream_id is not None:
                prefilled += (await engine.stream_state(feeder.stream_id)).prefilled_tokens
    return prefilled / seconds


def _max_fed_tokens(tps: float) -> int:
    """Return the most tokens that a stream gets beyond its prefix."""
    return int(tps * _FEEDING_SECONDS)


def _make_source(text: list[int], tps: float, started: float) -> Callable[[], Sequence[int]]:
    """Make a function that returns the tokens of ``text`` that are written by now."""
    return lambda: text[: int((time.perf_counter() - started) * tps)]


def compare(alone: Sequence[LatencyRound], beside: Sequence[LatencyRound]) -> LatencyBesideStreams:
    """Compare the rounds alone with those beside streams."""
    before, after = _summarise(alone), _summarise(beside)
    return LatencyBesideStreams(before, after, after.median / before.median, after.p99 / before.p99)


def _summarise(rounds: Sequence[LatencyRound]) -> TokenLatency:
    return TokenLatency(
        median=median(median(each.gaps) for each in rounds),
        p99=median(percentile(each.gaps, 0.99) for each in rounds),
        longest=median(max(each.gaps) for each in rounds),
        stream_tokens_per_second=median(each.stream_tokens_per_second for each in rounds),
    )


def show(latency: LatencyBesideStreams, console: Console) -> None:
    """Print the table."""
    title = "A request's time between tokens, ms"
    table = make_table(title, "", "median", "p99", "longest", "stream tokens/s")
    for name, figures in (("alone", latency.alone), ("beside streams", latency.beside)):
        times = (figures.median, figures.p99, figures.longest)
        cells = [f"{value * 1000:.1f}" for value in times]
        table.add_row(name, *cells, f"{figures.stream_tokens_per_second:.0f}")
    ratios = [f"{latency.median_ratio:.2f}x", f"{latency.p99_ratio:.2f}x (goal <= {GOAL_P99}x)"]
    table.add_row("ratio", *ratios, "", "")
    console.print(table)
