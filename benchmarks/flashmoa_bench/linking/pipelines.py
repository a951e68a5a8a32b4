"""Pipelines of two agents whose upstream writes at a set pace (FlashAgents §6.1, §6.4).

The upstream agent is a clock: its tokens are there at so many per second, whatever the
machine does, so that one engine suffices and nothing but the downstream is measured.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal, TypeVar

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.engines import Engines
from flashmoa_bench.harness.report import progress
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, ask_batch, random_ids
from flashmoa_bench.harness.rounds import alternating

PipelineWay = Literal["sequential", "batch", "linked"]
SUFFIX_TOKENS = 10
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Workload:
    """*TPS/Prefix/Upstream* of Figure 6 at one concurrency.

    Attributes:
        tps: tokens per second of each upstream agent.
        prefix: tokens known beforehand, shared by the pipelines of a round.
        upstream: tokens of each upstream agent, which no other one has.
        concurrency: pipelines at once.
    """

    tps: float
    prefix: int
    upstream: int
    concurrency: int

    @property
    def label(self) -> str:
        """Return *TPS/Prefix/Upstream*, as Figure 6 labels its workloads."""
        return f"{self.tps:g}/{self.prefix}/{self.upstream}"

    @property
    def decode_seconds(self) -> float:
        """Return T_decode of A: from its first token to its last."""
        return (self.upstream - 1) / self.tps

    @property
    def unique_tokens(self) -> int:
        """Return the prompt tokens of a round, each shared one counted once."""
        return self.prefix + self.concurrency * (self.upstream + SUFFIX_TOKENS)

    @property
    def pool_tokens(self) -> int:
        """Return the KV that a round needs at most: nothing shared, and what is being computed."""
        return 4096 + self.concurrency * (self.prefix + self.upstream + SUFFIX_TOKENS + 8)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The token ids of one pipeline; ``started`` in seconds of ``time.perf_counter``."""

    prefix: list[int]
    upstream: list[int]
    suffix: list[int]
    tps: float
    started: float

    @property
    def prompt(self) -> list[int]:
        return [*self.prefix, *self.upstream, *self.suffix]

    @property
    def end(self) -> float:
        return self.started + (len(self.upstream) - 1) / self.tps

    def written(self) -> Sequence[int]:
        """Return what the upstream agent has written by now; its first token is there at once."""
        count = int((time.perf_counter() - self.started) * self.tps) + 1
        return self.upstream[:count]


@dataclass(frozen=True, slots=True)
class PipelineRound:
    """One run of a workload.

    Attributes:
        seconds: T of Eq. 6, from A's first token to B's first; mean over pipelines.
        late_tokens: prompt tokens left to compute when B's request came; mean likewise.
        computed_tokens: prompt tokens the engine computed, over all pipelines.
        floor: seconds to the first token where all that A wrote before its last token is
            cached; nothing can hide what comes after that.
    """

    seconds: float
    late_tokens: float
    computed_tokens: int
    floor: float | None = None


async def play(
    engine: EngineClient, workload: Workload, dice: random.Random, way: PipelineWay
) -> PipelineRound:
    """Play one round on an empty cache, with fresh tokens.

    ``way``: *sequential* sends B's request when A has written its last token; *batch* sends
    those of all pipelines as one; *linked* feeds what A writes into B's prompt stream.
    """
    await engine.flush_cache()
    prefix = random_ids(dice, workload.prefix)
    parts = [
        (random_ids(dice, workload.upstream), random_ids(dice, SUFFIX_TOKENS))
        for _ in range(workload.concurrency)
    ]
    started = time.perf_counter()
    pipelines = [Pipeline(prefix, text, end, workload.tps, started) for text, end in parts]
    answers = await _PLAYS[way](engine, pipelines)
    return PipelineRound(
        seconds=mean(answer.first for answer in answers) - started,
        late_tokens=mean(answer.late_tokens for answer in answers),
        computed_tokens=sum(answer.late_tokens + answer.ahead_tokens for answer in answers),
        floor=await _floor(engine, pipelines, dice) if way == "linked" else None,
    )


async def _sequential(engine: EngineClient, pipelines: Sequence[Pipeline]) -> list[TimedAnswer]:
    async def one(pipeline: Pipeline) -> TimedAnswer:
        await until(pipeline.end)
        return await ask(engine, pipeline.prompt, 1)

    return await all_at_once(one, pipelines)


async def _batch(engine: EngineClient, pipelines: Sequence[Pipeline]) -> list[TimedAnswer]:
    await until(max(pipeline.end for pipeline in pipelines))
    return await ask_batch(engine, [pipeline.prompt for pipeline in pipelines])


async def _linked(engine: EngineClient, pipelines: Sequence[Pipeline]) -> list[TimedAnswer]:
    """Feed each upstream's tokens into a prompt stream as they come (Algorithm 1)."""

    async def one(pipeline: Pipeline) -> TimedAnswer:
        async with Feeder(engine, pipeline.prefix, pipeline.written) as feeder:
            await until(pipeline.end)
            return await ask(engine, pipeline.prompt, 1, feeder.take_over())

    return await all_at_once(one, pipelines)


_PLAYS = {"sequential": _sequential, "batch": _batch, "linked": _linked}


async def _floor(engine: EngineClient, pipelines: Sequence[Pipeline], dice: random.Random) -> float:
    """Measure the least seconds to the first token that any overlap could reach.

    The same prompts are sent all at once with another last upstream token and another suffix, so
    that exactly these are not cached.
    """

    async def one(pipeline: Pipeline) -> float:
        known = len(pipeline.prompt) - 1 - SUFFIX_TOKENS
        prompt = [*pipeline.prompt[:known], *random_ids(dice, 1 + SUFFIX_TOKENS)]
        started = time.perf_counter()
        return (await ask(engine, prompt, 1)).first - started

    return mean(await all_at_once(one, pipelines))


async def all_at_once(
    run: Callable[[Pipeline], Awaitable[Result]], pipelines: Sequence[Pipeline]
) -> list[Result]:
    """Run all at once; return the results in the order they came."""
    results: list[Result] = []

    async def one(pipeline: Pipeline) -> None:
        results.append(await run(pipeline))

    async with anyio.create_task_group() as group:
        for pipeline in pipelines:
            group.start_soon(one, pipeline)
    return results


async def until(moment: float) -> None:
    await anyio.sleep(max(0.0, moment - time.perf_counter()))


# By what a column is called: the engine's role, and how it is asked.
Ways = Mapping[str, tuple[str, PipelineWay]]
Rounds = dict[str, list[PipelineRound]]


async def play_grid(
    engines: Engines,
    grid: Sequence[Workload],
    ways: Ways,
    arguments: argparse.Namespace,
    console: Console,
) -> list[Rounds]:
    """Play each workload in every way, in turns, after a warm-up that is not counted.

    Returns: the rounds of each workload, by way.
    """
    dice = random.Random(arguments.seed)
    played: list[Rounds] = []

    async def run(name: str, workload: Workload) -> PipelineRound:
        role, way = ways[name]
        return await play(engines[role], workload, dice, way)

    with progress(console) as bars:
        bar = bars.add_task("warming up", total=len(grid) * arguments.repeats * len(ways))
        largest = max(grid, key=lambda workload: workload.pool_tokens)
        for name in ways:
            await run(name, largest)
        for workload in grid:
            bars.update(bar, description=f"{workload.label} C={workload.concurrency}")
            rounds: Rounds = {name: [] for name in ways}
            for name in alternating(arguments.repeats, list(ways)):
                rounds[name].append(await run(name, workload))
                bars.advance(bar)
            played.append(rounds)
    return played
