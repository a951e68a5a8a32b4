"""What FlashMoA's plugin and its prompt streams cost other requests.

*Throughput*: the same mix of requests on stock SGLang and on an engine with the plugin and no
stream open. *Latency*: a request that decodes alone, and beside prompt streams that fill on the
same engine; the time between its tokens. *Pressure*: pipelines that together need more than the
KV pool holds, linked and unlinked; it has an engine with a small pool to itself.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.requests import ask, random_ids
from flashmoa_bench.harness.rounds import alternating
from flashmoa_bench.linking import latency, pressure

ROLES = (Role("stock", plugin=False), Role("flashmoa", plugin=True))
GOAL_THROUGHPUT = 0.99
# Tokens of the mix's prompts and answers, at least and at most.
_MIX_PROMPT = (16, 256)
_MIX_OUTPUT = (8, 48)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second, of prompt and output; medians over rounds.

    Attributes:
        ratio: plugin over stock, median over pairs of rounds, one right after the other.
    """

    stock: float
    plugin: float
    ratio: float
    ratios: tuple[float, ...]


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench interference``; return the exit status."""
    parser = command_line("interference", __doc__, ROLES)
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=("throughput", "latency", "pressure"),
        default=["throughput", "latency"],
        help="pressure by itself: it needs an engine with a small KV pool",
    )
    mix = parser.add_argument_group("throughput")
    mix.add_argument("--requests", type=positive, default=32, help="in a round")
    mix.add_argument("--concurrency", type=positive, default=8, help="requests at once")
    mix.add_argument("--pairs", type=positive, default=11, help="rounds on each engine")
    latency.add_options(parser)
    pressure.add_options(parser)
    both = parser.add_argument_group("latency and pressure")
    both.add_argument("--prefix", type=positive, help="tokens known of each stream (2000; 400)")
    both.add_argument("--tps", type=float, help="more tokens per second of each (50; 25)")
    chosen = parser.parse_args(arguments)
    is_pressure = "pressure" in chosen.measure
    if is_pressure and len(chosen.measure) > 1:
        parser.error("--measure pressure needs an engine of its own: measure it by itself")
    chosen.prefix = chosen.prefix or (400 if is_pressure else 2000)
    chosen.tps = (25.0 if is_pressure else 50.0) if chosen.tps is None else chosen.tps
    if chosen.tps <= 0 or chosen.over <= 0:
        parser.error("--tps and --over must be above 0")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("interference", arguments)
    is_pressure = "pressure" in arguments.measure
    pool = (
        pressure.PressureLoad.of(arguments).pool_tokens if is_pressure else _pool_tokens(arguments)
    )
    roles = ROLES if "throughput" in arguments.measure else ROLES[1:]
    results: dict[str, Any] = {}
    async with connected(roles, arguments, pool, console) as engines:
        await report.describe(engines)
        report.head(console)
        if "throughput" in arguments.measure:
            flow = await _measure_throughput(engines, arguments, console)
            results["throughput"] = asdict(flow)
            show_throughput(flow, console)
        if "latency" in arguments.measure:
            results["latency"] = await latency.measure(engines["flashmoa"], arguments, console)
        if is_pressure:
            results["pressure"] = await pressure.measure(engines["flashmoa"], arguments, console)
    report.save(console, results)


def _pool_tokens(arguments: argparse.Namespace) -> int:
    """Return the KV for the streams, with what they may still receive, or for the mix."""
    mix = arguments.concurrency * (_MIX_PROMPT[1] + _MIX_OUTPUT[1])
    return 4096 + max(latency.pool_tokens(arguments), mix)


async def _measure_throughput(
    engines: Engines, arguments: argparse.Namespace, console: Console
) -> Throughput:
    dice = random.Random(arguments.seed)
    lengths = [
        (dice.randint(*_MIX_PROMPT), dice.randint(*_MIX_OUTPUT)) for _ in range(arguments.requests)
    ]
    found: dict[str, list[float]] = {"stock": [], "flashmoa": []}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=2 * arguments.pairs)
        for name in found:
            await _play_mix(engines[name], lengths, arguments.concurrency, dice)
        for name in alternating(arguments.pairs, list(found)):
            bars.update(bar, description=f"throughput {name}")
            done = await _play_mix(engines[name], lengths, arguments.concurrency, dice)
            found[name].append(done)
            bars.advance(bar)
    return throughput(found["stock"], found["flashmoa"])


async def _play_mix(
    engine: EngineClient,
    lengths: Sequence[tuple[int, int]],
    concurrency: int,
    dice: random.Random,
) -> float:
    """Play one round on an empty cache, with fresh tokens.

    Args:
        lengths: tokens of prompt and output of each request.

    Returns: tokens per second, of prompt and output.
    """
    await engine.flush_cache()
    waiting = [(random_ids(dice, prompt), output) for prompt, output in lengths]
    waiting.reverse()

    async def client() -> None:
        while waiting:
            prompt, output = waiting.pop()
            await ask(engine, prompt, output)

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(client)
    return sum(map(sum, lengths)) / (time.perf_counter() - started)


def throughput(stock: Sequence[float], plugin: Sequence[float]) -> Throughput:
    """Compare the tokens per second of the rounds of each, in the order they were run."""
    ratios = tuple(b / a for a, b in zip(stock, plugin, strict=True))
    return Throughput(median(stock), median(plugin), median(ratios), ratios)


def show_throughput(flow: Throughput, console: Console) -> None:
    """Print the table."""
    table = Table(title="Throughput without streams, tokens per second", title_justify="left")
    for name in ("stock", "plugin", "plugin/stock", "least", "most", "goal"):
        table.add_column(name, justify="right")
    ratios = (flow.ratio, min(flow.ratios), max(flow.ratios))
    cells = (f"{flow.stock:.0f}", f"{flow.plugin:.0f}", *(f"{ratio:.3f}" for ratio in ratios))
    table.add_row(*cells, f">= {GOAL_THROUGHPUT}")
    console.print(table)
    console.print("plugin/stock: median over pairs of rounds, one right after the other.\n")
