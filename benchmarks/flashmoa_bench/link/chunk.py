"""Measure the costs of prefilling in chunks (FlashAgents §6.5, Figure 8).

Prefill-only requests with ever longer prompts prefill a fixed context in chunks, of several sizes.
The sum of all chunks is compared with a single pass, and the last chunk with the first.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from flashmoa.engine import EngineClient
from flashmoa.errors import BadAnswer
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.modelled_gpus import counted_since, read_device
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.requests import random_ids
from flashmoa_bench.harness.rounds import RoundPlayer

ROLES = (Role("flashmoa", plugin=True),)
# The time of all chunks over a single pass in Figure 8, by chunk size.
PAPER = {128: "up to 3x", 512: "~1.2x"}


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """One chunk size's figures; medians over rounds.
    Attributes:
        seconds: time of each chunk: its forwards' on a modelled GPU, else the engine's measurement.
        last_over_first: last over first full chunk; ``None`` with less than two full chunks.
    """

    chunk: Annotated[int, Column("chunk")]
    seconds: tuple[float, ...]
    total: Annotated[float, Column("total", "{:.1f} ms", 1000)]
    over_single_pass: Annotated[float, Column("over single pass", "{:.2f}x")]
    last_over_first: Annotated[float | None, Column("last chunk over first", "{:+.1%}", less=1)]

    @property
    def paper(self) -> Annotated[str, Column("paper")]:
        return PAPER.get(self.chunk, "")


def _check(options: argparse.Namespace) -> str | None:
    if max(options.chunks) > options.context:
        return "--chunks cannot be larger than --context"
    return None


async def _measure(report: Report) -> None:
    options = report.options
    async with report.connect(ROLES, 4096 + 2 * options.context) as engines:
        dice, engine = random.Random(options.seed), engines["flashmoa"]
        sizes = sorted({*options.chunks, options.context})

        async def run(chunk: int) -> list[float]:
            return await _prefill(engine, random_ids(dice, options.context), chunk)

        with RoundPlayer(report.console, options.repeats, len(sizes)) as player:
            rounds = await player.play(sizes, run, "chunks of")
    rows = summarise(rounds, options.context)
    report.show(
        f"Chunked prefill of {options.context} tokens",
        rows,
        "The paper's last chunk of 128 is 4.6-7.9 % slower than its first.",
    )
    report.save({"sizes": rows})


async def _prefill(engine: EngineClient, ids: list[int], chunk: int) -> list[float]:
    """Prefill ``ids`` in chunks, and return the device's seconds for each.

    Raises: BadAnswer if the engine computed a different number of tokens.
    """
    await engine.flush_cache()
    seconds: list[float] = []
    for start in range(0, len(ids), chunk):
        end = min(len(ids), start + chunk)
        before = await read_device(engine.url)
        done = await engine.prefill_only(input_ids=ids[:end])
        # With a page size above 1, the next chunk computes the end of this chunk.
        if abs(done.prefilled_tokens - (end - start)) > max(1, chunk // 4):
            raise BadAnswer(
                f"{engine.url} computed {done.prefilled_tokens} tokens for a chunk of "
                f"{end - start}; does its radix cache work?"
            )
        if before and (after := await read_device(engine.url)):
            # The time of the forwards alone, without the request around them.
            forwards = counted_since(before, after)
            seconds.append(clock.seconds_of(forwards["device_seconds"]))
        else:
            seconds.append(done.seconds)
    return seconds


def summarise(rounds: Mapping[int, Sequence[Sequence[float]]], context: int) -> list[ChunkSize]:
    """Summarise the seconds of each chunk of each round, by chunk size."""
    single = median(sum(seconds) for seconds in rounds[context])
    sizes: list[ChunkSize] = []
    for chunk, group in rounds.items():
        seconds = tuple(median(values) for values in zip(*group, strict=True))
        total = median(sum(values) for values in group)
        full = context // chunk
        last = seconds[full - 1] / seconds[0] if full > 1 else None
        sizes.append(ChunkSize(chunk, seconds, total, total / single, last))
    return sizes


main = command(
    "chunk",
    __doc__,
    _measure,
    ROLES,
    Option("--context", positive, 1024, "tokens in all"),
    Option("--chunks", positive, [128, 256, 384, 512], "tokens each"),
    check=_check,
)
