"""What requests that use no stream notice of FlashMoA.

*Throughput*: the same mix of requests on stock SGLang and on an engine with the plugin and no
stream open. *Stranger*: a request that decodes by itself, and while prompt streams fill on the
same engine; the time between its tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.rounds import alternating
from flashmoa_bench.linking import stranger, traffic

ROLES = (Role("stock", plugin=False), Role("flashmoa", plugin=True))
GOAL_THROUGHPUT = 0.99
GOAL_P99 = 1.25


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second, prompt and output; ``ratio``: plugin over stock, median of pairs.

    Each pair is one round on each engine, one right after the other.
    """

    stock: float
    plugin: float
    ratio: float
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Both halves of the benchmark."""

    throughput: Throughput
    stranger: stranger.Strangers


def main(arguments: Sequence[str]) -> int:
    """``flashmoa bench neighbours``; returns the exit status."""
    parser = command_line("neighbours", __doc__, ROLES)
    mix = parser.add_argument_group("throughput")
    mix.add_argument("--requests", type=positive, default=32, help="in a round")
    mix.add_argument("--concurrency", type=positive, default=8, help="requests at once")
    mix.add_argument("--pairs", type=positive, default=11, help="rounds on each engine")
    other = parser.add_argument_group("stranger")
    other.add_argument("--tokens", type=positive, default=512, help="it decodes")
    other.add_argument("--streams", type=positive, default=8, help="that fill meanwhile")
    other.add_argument("--prefix", type=positive, default=2000, help="tokens known of each")
    other.add_argument("--tps", type=float, default=50.0, help="more tokens per second of each")
    chosen = parser.parse_args(arguments)
    if chosen.tps <= 0:
        parser.error("--tps must be above 0")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("neighbours", arguments)
    async with connected(ROLES, arguments, _pool_tokens(arguments), console) as engines:
        await report.describe(engines)
        report.head(console)
        throughput = await _throughput(engines, arguments, console)
        strangers = await _strangers(engines, arguments, console)
    result = Neighbours(throughput, strangers)
    show(result, console)
    report.save(console, asdict(result))


def _pool_tokens(arguments: argparse.Namespace) -> int:
    """KV for the streams, with what they may still receive, or for the mix."""
    streams = arguments.streams * (arguments.prefix + stranger.most_fed(arguments.tps))
    return 4096 + max(streams + arguments.tokens, arguments.concurrency * traffic.MOST_TOKENS)


async def _throughput(
    engines: Engines, arguments: argparse.Namespace, console: Console
) -> Throughput:
    dice = random.Random(arguments.seed)
    lengths = traffic.lengths(arguments.requests, dice)
    found: dict[str, list[float]] = {"stock": [], "flashmoa": []}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=2 * arguments.pairs)
        for name in found:
            await traffic.play(engines[name], lengths, arguments.concurrency, dice)
        for name in alternating(arguments.pairs, list(found)):
            bars.update(bar, description=f"throughput {name}")
            done = await traffic.play(engines[name], lengths, arguments.concurrency, dice)
            found[name].append(done)
            bars.advance(bar)
    return throughput(found["stock"], found["flashmoa"])


def throughput(stock: Sequence[float], plugin: Sequence[float]) -> Throughput:
    """Tokens per second of the rounds of each, in the order they were run."""
    ratios = tuple(b / a for a, b in zip(stock, plugin, strict=True))
    return Throughput(median(stock), median(plugin), median(ratios), ratios)


async def _strangers(
    engines: Engines, arguments: argparse.Namespace, console: Console
) -> stranger.Strangers:
    engine = engines["flashmoa"]
    dice = random.Random(arguments.seed + 1)
    streams = stranger.Streams(arguments.streams, arguments.prefix, arguments.tps)
    alone = stranger.Streams(0, arguments.prefix, arguments.tps)
    rounds: dict[str, list[stranger.Round]] = {"alone": [], "beside": []}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=2 * arguments.repeats)
        await stranger.play(engine, arguments.tokens, alone, dice)
        for name in alternating(arguments.repeats, list(rounds)):
            bars.update(bar, description=f"stranger {name}")
            chosen = alone if name == "alone" else streams
            rounds[name].append(await stranger.play(engine, arguments.tokens, chosen, dice))
            bars.advance(bar)
    return stranger.summarise(rounds["alone"], rounds["beside"])


def show(result: Neighbours, console: Console) -> None:
    """Print both tables."""
    flow = result.throughput
    table = Table(title="Throughput without streams, tokens per second", title_justify="left")
    for name in ("stock", "plugin", "plugin/stock", "least", "most", "goal"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{flow.stock:.0f}",
        f"{flow.plugin:.0f}",
        f"{flow.ratio:.3f}",
        f"{min(flow.ratios):.3f}",
        f"{max(flow.ratios):.3f}",
        f">= {GOAL_THROUGHPUT}",
    )
    console.print(table)
    other = result.stranger
    table = Table(title="A stranger's time between tokens, ms", title_justify="left")
    for name in ("", "median", "p99", "longest", "stream tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in (("alone", other.alone), ("beside streams", other.beside)):
        times = (figures.median, figures.p99, figures.longest)
        cells = [f"{value * 1000:.1f}" for value in times]
        table.add_row(name, *cells, f"{figures.stream_tokens_per_second:.0f}")
    ratios = [f"{other.median_ratio:.2f}x", f"{other.p99_ratio:.2f}x (goal <= {GOAL_P99}x)"]
    table.add_row("ratio", *ratios, "", "")
    console.print(table)
    console.print("plugin/stock: median over pairs of rounds, one right after the other.\n")
