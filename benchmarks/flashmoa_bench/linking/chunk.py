"""What prefilling in pieces costs (FlashAgents §6.5, Figure 8).

A fixed context is prefilled in chunks of several sizes, by prefill-only requests with ever
longer prompts: in total against a single pass, and the last chunk against the first one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import BadAnswer, EngineClient
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.requests import random_ids
from flashmoa_bench.harness.rounds import alternating

ROLES = (Role("flashmoa", plugin=True),)
# Figure 8: what it says of chunks of 128 and of 512 tokens, over a single pass.
PAPER = {128: "up to 3x", 512: "~1.2x"}
PAPER_LAST = "4.6-7.9 % slower"


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """One chunk size; medians over rounds.

    Attributes:
        seconds: of each chunk in turn, as the engine measured them.
        total: seconds of all, median of the rounds' sums.
        over_single_pass: total over that of the whole context at once.
        last_over_first: the last full chunk's seconds over the first's; ``None`` for fewer
            than two full chunks.
    """

    chunk: int
    seconds: tuple[float, ...]
    total: float
    over_single_pass: float
    last_over_first: float | None


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench chunk``; return the exit status."""
    parser = command_line("chunk", __doc__, ROLES)
    parser.add_argument("--context", type=positive, default=1024, help="tokens in all")
    parser.add_argument(
        "--chunks", type=positive, nargs="+", default=[128, 256, 384, 512], help="tokens each"
    )
    chosen = parser.parse_args(arguments)
    if max(chosen.chunks) > chosen.context:
        parser.error("--chunks cannot be larger than --context")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("chunk", arguments)
    async with connected(ROLES, arguments, 4096 + 2 * arguments.context, console) as engines:
        await report.describe(engines)
        report.head(console)
        rounds = await _measure(engines["flashmoa"], arguments, console)
    sizes = summarise(rounds, arguments.context)
    show(sizes, arguments.context, console)
    report.save(console, {"sizes": [asdict(size) for size in sizes]})


async def _measure(
    engine: EngineClient, arguments: argparse.Namespace, console: Console
) -> dict[int, list[list[float]]]:
    dice = random.Random(arguments.seed)
    names = [str(chunk) for chunk in sorted({*arguments.chunks, arguments.context})]
    rounds: dict[int, list[list[float]]] = {int(name): [] for name in names}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=arguments.repeats * len(names))
        for name in names:
            await _prefill(engine, random_ids(dice, arguments.context), int(name))
        for name in alternating(arguments.repeats, names):
            bars.update(bar, description=f"chunks of {name}")
            ids = random_ids(dice, arguments.context)
            rounds[int(name)].append(await _prefill(engine, ids, int(name)))
            bars.advance(bar)
    return rounds


async def _prefill(engine: EngineClient, ids: list[int], chunk: int) -> list[float]:
    """Prefill ``ids`` in chunks; return the seconds of each.

    Raises: BadAnswer if the engine computed another number of tokens.
    """
    await engine.flush_cache()
    seconds: list[float] = []
    for start in range(0, len(ids), chunk):
        end = min(len(ids), start + chunk)
        done = await engine.prefill_only(input_ids=ids[:end])
        # Page sizes above 1 leave the end of a chunk to the next one.
        if abs(done.prefilled_tokens - (end - start)) > max(1, chunk // 4):
            raise BadAnswer(
                f"{engine.url} computed {done.prefilled_tokens} tokens for a chunk of "
                f"{end - start}; does its radix cache work?"
            )
        seconds.append(done.seconds)
    return seconds


def summarise(rounds: Mapping[int, Sequence[Sequence[float]]], context: int) -> list[ChunkSize]:
    """Summarise ``rounds``: by chunk size, the seconds of each chunk of each round."""
    single = median(sum(seconds) for seconds in rounds[context])
    return [_size(chunk, group, context, single) for chunk, group in rounds.items()]


def _size(chunk: int, group: Sequence[Sequence[float]], context: int, single: float) -> ChunkSize:
    seconds = tuple(median(values) for values in zip(*group, strict=True))
    total = median(sum(values) for values in group)
    full = context // chunk
    last = seconds[full - 1] / seconds[0] if full > 1 else None
    return ChunkSize(chunk, seconds, total, total / single, last)


def show(sizes: Sequence[ChunkSize], context: int, console: Console) -> None:
    """Print the table beside what the paper says."""
    title = f"Chunked prefill of {context} tokens"
    table = Table(title=title, title_justify="left")
    for name in ("chunk", "chunks", "total", "over single pass", "paper", "last chunk over first"):
        table.add_column(name, justify="right")
    for size in sizes:
        last = size.last_over_first
        table.add_row(
            str(size.chunk),
            str(len(size.seconds)),
            f"{size.total * 1000:.1f} ms",
            f"{size.over_single_pass:.2f}x",
            PAPER.get(size.chunk, ""),
            f"{(last - 1) * 100:+.1f} %" if last is not None else "",
        )
    console.print(table)
    console.print(f"The paper's last chunk of 128 is {PAPER_LAST} than its first.\n")
