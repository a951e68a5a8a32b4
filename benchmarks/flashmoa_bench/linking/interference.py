"""Measure what FlashMoA's plugin and its prompt streams cost other requests.

*Throughput*: the same mix of requests on stock SGLang and on an engine with the plugin and no
stream open. *Latency*: a request that belongs to no workflow, beside workflows on stock SGLang, and
beside the same workflows with the plugin, unlinked and linked.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import (
    add_stock_forwards,
    make_parser,
    mixed_roles,
    positive,
)
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently
from flashmoa_bench.linking import latency

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
        choices=("throughput", "latency"),
        default=["throughput", "latency"],
    )
    mix = parser.add_argument_group("throughput")
    mix.add_argument("--requests", type=positive, default=32, help="requests of a round")
    mix.add_argument("--concurrency", type=positive, default=8, help="requests at once")
    mix.add_argument("--pairs", type=positive, default=11, help="rounds on each engine")
    latency.add_options(parser)
    add_stock_forwards(parser, [512])
    chosen = parser.parse_args(arguments)
    if chosen.tps <= 0:
        parser.error("--tps must be above 0")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("interference", arguments)
    load = latency.load_from(arguments)
    mix = arguments.concurrency * (_MIX_PROMPT[1] + _MIX_OUTPUT[1])
    pool = load.pool_tokens + mix + 4096
    stock = mixed_roles(arguments.stock_forwards) if "latency" in arguments.measure else {}
    roles = [*ROLES, *stock.values()]
    results: dict[str, Any] = {}
    async with report.connect(roles, pool) as engines:
        for name in arguments.measure:
            if name == "throughput":
                throughput = await _measure_throughput(engines, arguments, report.console)
                results[name] = asdict(throughput)
                show_throughput(throughput, report.console)
            else:
                results[name] = await latency.measure(engines, load, arguments, report.console)
    report.save(results)


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

    started = clock.now()
    await run_concurrently(send, requests, concurrency)
    return sum(map(sum, lengths)) / (clock.now() - started)


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
