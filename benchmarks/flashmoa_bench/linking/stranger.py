"""One request that decodes while prompt streams fill on the same engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

import anyio

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.requests import Answer, Feeder, ask, random_ids
from flashmoa_bench.harness.rounds import gaps, percentile

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
class Round:
    """Seconds between the stranger's tokens, and stream tokens prefilled per second."""

    gaps: tuple[float, ...]
    stream_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds between tokens; medians over rounds of each round's figure."""

    median: float
    p99: float
    longest: float
    stream_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Strangers:
    """A stranger alone and beside streams; ratios: beside over alone."""

    alone: Latency
    beside: Latency
    median_ratio: float
    p99_ratio: float


def most_fed(tps: float) -> int:
    """Tokens that a stream gets at most beyond what is known of it."""
    return int(tps * _FED_SECONDS)


async def play(engine: EngineClient, tokens: int, streams: Streams, dice: random.Random) -> Round:
    """One round on an empty cache: a stranger decodes ``tokens`` beside ``streams``.

    The streams are opened once the stranger's first token is there, and deleted after its
    last one.
    """
    await engine.flush_cache()
    answer, over, found = Answer(), anyio.Event(), 0.0

    async def decode() -> None:
        await ask(engine, random_ids(dice, _PROMPT_TOKENS), tokens, into=answer)
        over.set()

    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        await answer.begun.wait()
        found = await _filled(engine, streams, dice, over)
    return Round(tuple(gaps(answer.times)), found)


async def _filled(
    engine: EngineClient, streams: Streams, dice: random.Random, over: anyio.Event
) -> float:
    """Fill the streams until ``over``: tokens prefilled per second, over all of them."""
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        feeders: list[Feeder] = []
        for _ in range(streams.count):
            known = random_ids(dice, streams.prefix)
            more = random_ids(dice, most_fed(streams.tps))
            feeder = Feeder(engine, known, _paced(more, streams.tps, started))
            feeders.append(await stack.enter_async_context(feeder))
        await over.wait()
        seconds, prefilled = time.perf_counter() - started, 0
        for feeder in feeders:
            if feeder.stream_id is not None:
                prefilled += (await engine.stream_state(feeder.stream_id)).prefilled_tokens
    return prefilled / seconds


def _paced(text: list[int], tps: float, started: float) -> Callable[[], Sequence[int]]:
    return lambda: text[: int((time.perf_counter() - started) * tps)]


def summarise(alone: Sequence[Round], beside: Sequence[Round]) -> Strangers:
    before, after = _latency(alone), _latency(beside)
    return Strangers(before, after, after.median / before.median, after.p99 / before.p99)


def _latency(rounds: Sequence[Round]) -> Latency:
    return Latency(
        median=median(median(one.gaps) for one in rounds),
        p99=median(percentile(one.gaps, 0.99) for one in rounds),
        longest=median(max(one.gaps) for one in rounds),
        stream_tokens_per_second=median(one.stream_tokens_per_second for one in rounds),
    )
