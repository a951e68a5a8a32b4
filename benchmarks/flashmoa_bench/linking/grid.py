"""Workloads played in several ways on several engines, in turns."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence

from rich.console import Console

from flashmoa_bench.harness.engines import Engines
from flashmoa_bench.harness.report import progress
from flashmoa_bench.harness.rounds import alternating
from flashmoa_bench.linking.pipelines import Round, Way, Workload, play

# By what a column is called: the engine's role, and how it is asked.
Ways = Mapping[str, tuple[str, Way]]
Rounds = dict[str, list[Round]]


async def play_grid(
    engines: Engines,
    grid: Sequence[Workload],
    ways: Ways,
    arguments: argparse.Namespace,
    console: Console,
) -> list[Rounds]:
    """The rounds of each workload by way, after a warm-up that is not counted."""
    dice = random.Random(arguments.seed)
    played: list[Rounds] = []

    async def run(name: str, workload: Workload) -> Round:
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
