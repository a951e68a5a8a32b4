"""Play pipelines of two agents, A and B (FlashAgents §6.1, §6.4).

A, the upstream agent, is a clock: its tokens come at a fixed rate, whatever the machine does. So
one engine is enough, and only B, the downstream agent, is measured.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Literal

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.engines import Engines
from flashmoa_bench.harness.modelled_gpus import read_devices, worst_overrun
from flashmoa_bench.harness.report import progress_bar
from flashmoa_bench.harness.requests import TimedAnswer, ask, ask_batch, feeding, random_ids
from flashmoa_bench.harness.rounds import run_concurrently

PipelineWay = Literal["sequential", "batch", "linked"]
SUFFIX_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """*TPS/Prefix/Upstream* of Figure 6 at one concurrency.

    Attributes:
        prefix: known tokens, which the pipelines of a round share.
        upstream: tokens that each upstream agent writes; nothing is shared.
    """

    tps: float
    prefix: int
    upstream: int
    concurrency: int

    def __str__(self) -> str:
        """Return *TPS/Prefix/Upstream*, as Figure 6 has it, and the concurrency."""
        return f"{self.tps:g}/{self.prefix}/{self.upstream} C={self.concurrency}"

    @property
    def decode_seconds(self) -> float:
        """Return the time from A's first token to its last (T_decode)."""
        return (self.upstream - 1) / self.tps

    @property
    def unique_tokens(self) -> int:
        """Return a round's number of prompt tokens, each shared token counted once."""
        return self.prefix + self.concurrency * (self.upstream + SUFFIX_TOKENS)

    @property
    def pool_tokens(self) -> int:
        """Return the largest number of KV tokens that a round needs if nothing is shared."""
        return 4096 + self.concurrency * (self.prefix + self.upstream + SUFFIX_TOKENS + 8)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline's token ids; ``started`` is in seconds of the benchmark's clock."""

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
        """Return the tokens that A has written by now; the first token is there from the start."""
        count = int((clock.now() - self.started) * self.tps) + 1
        return self.upstream[:count]


@dataclass(frozen=True, slots=True)
class PipelineRound:
    """One run of a workload.

    Attributes:
        seconds: T of Eq. 6, from A's first token to B's first; mean over pipelines.
        late_tokens: prompt tokens left to compute when B's request came; mean over pipelines.
        computed_tokens: prompt tokens that the engine computed for all pipelines.
        floor: seconds to B's first token if everything before A's last token is cached; no overlap
            can hide this time.
    """

    seconds: float
    late_tokens: float
    computed_tokens: int
    floor: float | None = None


async def play(
    engine: EngineClient, workload: Workload, dice: random.Random, way: PipelineWay
) -> PipelineRound:
    """Play one round on an empty cache, with fresh tokens.

    Args:
        way: *sequential* sends B's request after A's last token; *batch* sends all pipelines'
            requests as one; *linked* feeds A's tokens into B's prompt stream.
    """
    await engine.flush_cache()
    prefix = random_ids(dice, workload.prefix)
    parts = [
        (random_ids(dice, workload.upstream), random_ids(dice, SUFFIX_TOKENS))
        for _ in range(workload.concurrency)
    ]
    started = clock.now()
    pipelines = [Pipeline(prefix, text, end, workload.tps, started) for text, end in parts]
    if way == "batch":
        await clock.sleep_until(pipelines[0].end)
        answers = await ask_batch(engine, [pipeline.prompt for pipeline in pipelines])
    else:
        run = partial(ask_downstream, engine, tokens=1, linked=way == "linked")
        answers = await run_concurrently(run, pipelines)
    return PipelineRound(
        seconds=mean(answer.first for answer in answers) - started,
        late_tokens=mean(answer.late_tokens for answer in answers),
        computed_tokens=sum(answer.late_tokens + answer.ahead_tokens for answer in answers),
        floor=await _measure_floor(engine, pipelines, dice) if way == "linked" else None,
    )


async def ask_downstream(
    engine: EngineClient, pipeline: Pipeline, tokens: int, *, linked: bool
) -> TimedAnswer:
    """Ask for B's answer after A's last token.

    Args:
        linked: whether A's tokens are fed into B's prompt stream as they come (Algorithm 1).
    """
    async with feeding(engine, pipeline.prefix, pipeline.written, is_linked=linked) as claim:
        await clock.sleep_until(pipeline.end)
        return await ask(engine, pipeline.prompt, tokens, claim())


async def _measure_floor(
    engine: EngineClient, pipelines: Sequence[Pipeline], dice: random.Random
) -> float:
    """Measure the shortest time to the first token that any overlap could reach, in seconds.

    All prompts are sent again at once with a new last upstream token and suffix, so that only these
    tokens are not cached.
    """
    # The overlap schedule may have begun another step for the earlier answers. No decode step here
    # takes this long.
    await clock.sleep(0.1)

    async def run(pipeline: Pipeline) -> float:
        known = len(pipeline.prompt) - 1 - SUFFIX_TOKENS
        prompt = [*pipeline.prompt[:known], *random_ids(dice, 1 + SUFFIX_TOKENS)]
        started = clock.now()
        return (await ask(engine, prompt, 1)).first - started

    return mean(await run_concurrently(run, pipelines))


# The engine's role and the pipelines' way, by the name of the table's column.
Ways = Mapping[str, tuple[str, PipelineWay]]
Rounds = dict[str, list[PipelineRound]]


async def play_grid(
    engines: Engines,
    grid: Sequence[Workload],
    ways: Ways,
    repeats: int,
    seed: int,
    console: Console,
) -> AsyncGenerator[tuple[Workload, Rounds, float]]:
    """Play each workload in every way, at most ``repeats`` times, after a warm-up.

    On a CPU the ways take turns. Engines on modelled GPUs mostly sleep, so there the ways run side
    by side.

    Yields: each workload, its rounds by way, and the largest overrun as a share of a GPU's time.
    """
    used = {role: engines[role] for role, _way in ways.values()}
    side_by_side = len(await read_devices(used)) == len(used)

    async def run(name: str, workload: Workload, dice: random.Random) -> PipelineRound:
        role, way = ways[name]
        return await play(engines[role], workload, dice, way)

    with progress_bar(console) as bars:
        bar = bars.add_task("warming up", total=len(grid))
        largest = max(grid, key=lambda workload: workload.pool_tokens)
        for name in ways:
            await run(name, largest, random.Random(seed))
        for workload in grid:
            bars.update(bar, description=str(workload))
            dice = random.Random(f"{seed} {workload}")
            before = await read_devices(used)
            play_once = partial(run, workload=workload, dice=dice)
            rounds = await play_cell(list(ways), play_once, repeats, side_by_side=side_by_side)
            yield workload, rounds, worst_overrun(before, await read_devices(used))
            bars.advance(bar)


async def play_cell(
    ways: Sequence[str],
    run: Callable[[str], Awaitable[PipelineRound]],
    repeats: int,
    *,
    side_by_side: bool,
) -> Rounds:
    """Play all ways, round after round, until the rounds of every way agree, or ``repeats`` times.

    At least three rounds are played. Each begins with another way.
    """
    rounds: Rounds = {way: [] for way in ways}

    async def play_way(way: str, delay: float) -> None:
        await clock.sleep(delay)
        rounds[way].append(await run(way))

    for number in range(repeats):
        turn = number % len(ways)
        order = [*ways[turn:], *ways[:turn]]
        if side_by_side:
            async with anyio.create_task_group() as group:
                for place, way in enumerate(order):
                    # Ways begin 0.3 seconds apart, so that their measured moments do not coincide.
                    group.start_soon(play_way, way, place * 0.3)
        else:
            for way in order:
                await play_way(way, 0)
        if number >= 2 and all(map(_agree, rounds.values())):
            break
    return rounds


def _agree(rounds: Sequence[PipelineRound]) -> bool:
    seconds = [each.seconds for each in rounds]
    return max(seconds) - min(seconds) <= 0.005 * median(seconds)
