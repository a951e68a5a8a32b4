"""Measure what FlashMoA's plugin and its prompt streams cost other requests.

*Throughput*: the same mix of requests on stock SGLang and on an engine with the plugin and no
stream open. *Latency*: the time between the tokens of a request that decodes alone, and of one that
decodes while prompt streams fill on the same engine. *Pressure*: pipelines that together need more
than the KV pool holds, linked and unlinked. It is measured by itself, because it needs an engine
with a small pool.
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

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently
from flashmoa_bench.linking import latency, pressure

ROLES = (Role("stock", plugin=False), Role("flashmoa", plugin=True))
GOAL_THROUGHPUT = 0.99
# Least and greatest number of tokens of the mix's prompts and answers.
_MIX_PROMPT = (16, 256)
_MIX_OUTPUT = (8, 48)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second, medians over rounds; ``ratios`` are plugin over stock, pair by pair."""

    stock: float
    plugin: float
    ratio: float
    ratios: tuple[float, ...]


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench interference`` and return the exit status."""
    parser = make_parser("interference", __doc__, ROLES)
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=("throughput", "latency", "pressure"),
        default=["throughput", "latency"],
        help="pressure by itself: it needs an engine with a small KV pool",
    )
    mix = parser.add_argument_group("throughput")
    mix.add_argument("--requests", type=positive, default=32, help="requests of a round")
    mix.add_argument("--concurrency", type=positive, default=8, help="requests at once")
    mix.add_argument("--pairs", type=positive, default=11, help="rounds on each engine")
    latency.add_options(parser)
    pressure.add_options(parser)
    both = parser.add_argument_group("latency and pressure")
    both.add_argument(
        "--prefix", type=positive, help="tokens known of each stream (2000; pressure: 400)"
    )
    both.add_argument(
        "--tps", type=float, help="tokens per second that each stream gets (50; pressure: 25)"
    )
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
    report = Report("interference", arguments)
    is_pressure = "pressure" in arguments.measure
    pool = (
        pressure.PressureLoad.from_options(arguments).pool_tokens
        if is_pressure
        else _pool_tokens(arguments)
    )
    roles = ROLES if "throughput" in arguments.measure else ROLES[1:]
    results: dict[str, Any] = {}
    async with report.connect(roles, pool) as engines:
        if "throughput" in arguments.measure:
            throughput = await _measure_throughput(engines, arguments, report.console)
            results["throughput"] = asdict(throughput)
            show_throughput(throughput, report.console)
        if "latency" in arguments.measure:
            results["latency"] = await latency.measure(
                engines["flashmoa"], arguments, report.console
            )
        if is_pressure:
            results["pressure"] = await pressure.measure(
                engines["flashmoa"], arguments, report.console
            )
    report.save(results)


def _pool_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens of KV that the streams or the mix can need, whichever is more."""
    mix = arguments.concurrency * (_MIX_PROMPT[1] + _MIX_OUTPUT[1])
    return 4096 + max(latency.pool_tokens(arguments), mix)


async def _measure_throughput(
    engines: Engines, arguments: argparse.Namespace, console: Console
) -> Throughput:
    dice = random.Random(arguments.seed)
    lengths = [
        (dice.randint(*_MIX_PROMPT), dice.randint(*_MIX_OUTPUT)) for _ in range(arguments.requests)
    ]

    async def run(name: str) -> float:
        return await _play_mix(engines[name], lengths, arguments.concurrency, dice)

    names = ["stock", "flashmoa"]
    with RoundPlayer(console, arguments.pairs, len(names)) as player:
        for name in names:
            await run(name)
        rounds = await player.play(names, run, "throughput")
    return compare(rounds["stock"], rounds["flashmoa"])


async def _play_mix(
    engine: EngineClient,
    lengths: Sequence[tuple[int, int]],
    concurrency: int,
    dice: random.Random,
) -> float:
    """Play one round on an empty cache, with fresh tokens.

    Args:
        lengths: number of tokens of each request's prompt and output.

    Returns: tokens of prompt and output per second.
    """
    await engine.flush_cache()
    requests = [(random_ids(dice, prompt), output) for prompt, output in lengths]

    async def send(request: tuple[list[int], int]) -> None:
        prompt, output = request
        await ask(engine, prompt, output)

    started = time.perf_counter()
    await run_concurrently(send, requests, concurrency)
    return sum(map(sum, lengths)) / (time.perf_counter() - started)


def compare(stock: Sequence[float], plugin: Sequence[float]) -> Throughput:
    """Compare the rounds of both engines; each is given as tokens per second, in their order."""
    ratios = tuple(b / a for a, b in zip(stock, plugin, strict=True))
    return Throughput(median(stock), median(plugin), median(ratios), ratios)


def show_throughput(throughput: Throughput, console: Console) -> None:
    """Print the table."""
    table = make_table(
        "Throughput without streams, tokens per second",
        *("stock", "plugin", "plugin/stock", "least", "most", "goal"),
    )
    ratios = (throughput.ratio, min(throughput.ratios), max(throughput.ratios))
    rates = (throughput.stock, throughput.plugin)
    cells = (*(f"{rate:.0f}" for rate in rates), *(f"{ratio:.3f}" for ratio in ratios))
    table.add_row(*cells, f">= {GOAL_THROUGHPUT}")
    console.print(table)
    console.print("plugin/stock: median over pairs of rounds, one right after the other.\n")
