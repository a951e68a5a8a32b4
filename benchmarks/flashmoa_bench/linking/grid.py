"""Play a grid of workloads in several ways."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import median

import anyio
from rich.console import Console

from flashmoa_bench.harness import clock
from flashmoa_bench.harness.engines import Engines
from flashmoa_bench.harness.modelled_gpus import counted_since, overrun_share, read_device
from flashmoa_bench.harness.report import progress_bar
from flashmoa_bench.linking.pipelines import PipelineRound, PipelineWay, Workload, play

# The engine's role and how its pipelines are played, by the name of the table's column.
Ways = Mapping[str, tuple[str, PipelineWay]]
Rounds = dict[str, list[PipelineRound]]
# When every way's rounds, this many at least, agree within this share, no more are played.
_LEAST_REPEATS, _AGREE = 3, 0.005
# Ways that are played side by side begin this many seconds after each other, so that the moments
# that matter do not coincide.
_APART_SECONDS = 0.3


async def play_grid(
    engines: Engines,
    grid: Sequence[Workload],
    ways: Ways,
    repeats: int,
    seed: int,
    console: Console,
) -> AsyncGenerator[tuple[Workload, Rounds, float]]:
    """Play each workload in every way, at most ``repeats`` times, after a warm-up.

    On a CPU the ways take turns. Engines on modelled GPUs have a GPU each and mostly sleep, so
    there the ways run side by side.

    Yields: each workload with its rounds by way, and the share of a GPU's time by which forwards
        were computed too late, the largest of all engines.
    """
    roles = {role for role, _way in ways.values()}
    side_by_side = all([await read_device(engines[role].url) for role in roles])

    async def run(name: str, workload: Workload, dice: random.Random) -> PipelineRound:
        role, way = ways[name]
        return await play(engines[role], workload, dice, way)

    with progress_bar(console) as bars:
        bar = bars.add_task("warming up", total=len(grid))
        largest = max(grid, key=lambda workload: workload.pool_tokens)
        for name in ways:
            await run(name, largest, random.Random(seed))
        for workload in grid:
            label = f"{workload.label} C={workload.concurrency}"
            bars.update(bar, description=label)
            dice = random.Random(f"{seed} {label}")
            before = {role: await read_device(engines[role].url) for role in roles}
            play_once = partial(run, workload=workload, dice=dice)
            rounds = await play_cell(list(ways), play_once, repeats, side_by_side=side_by_side)
            shares = [0.0]
            for role, device in before.items():
                if device and (after := await read_device(engines[role].url)):
                    shares.append(overrun_share(counted_since(device, after)))
            yield workload, rounds, max(shares)
            bars.advance(bar)


async def play_cell(
    ways: Sequence[str],
    run: Callable[[str], Awaitable[PipelineRound]],
    repeats: int,
    *,
    side_by_side: bool,
) -> Rounds:
    """Play all ways, round after round, until their rounds agree or there are ``repeats``.

    Each round begins with another way.
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
                    group.start_soon(play_way, way, place * _APART_SECONDS)
        else:
            for way in order:
                await play_way(way, 0)
        if number + 1 >= _LEAST_REPEATS and all(map(_agree, rounds.values())):
            break
    return rounds


def _agree(rounds: Sequence[PipelineRound]) -> bool:
    seconds = [each.seconds for each in rounds]
    return max(seconds) - min(seconds) <= _AGREE * median(seconds)
