"""Routing policies on simulated engines (MoE-Prefill §7, §8.2, Table 2), and running routers.

Simulated: the paper's mix of prefill-only requests, with synthetic texts, over 2 and 8 engines with
the shape of Qwen3-235B-A22B: random, in turn, sglang-router's cache_aware, and FlashMoA's, with and
without the engines' KV events and as the paper has it, where no request waits for a saturated
engine. Nothing is computed and nothing is timed; the same seed gives the same figures.

With --engine and --router: requests about a few documents and others about nothing in common,
answered with one token each by running engines. Every round begins with empty caches and goes
through each router in turn. The simulator replays the same prompts, with engines of the same cache
and forwards; its clock is arbitrary, its order is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import anyio

from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.routing import live, simulation


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench router``; return the exit status."""
    options = parse(arguments)
    if options.engine:
        anyio.run(live.measure, options)
    else:
        simulation.measure(options)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; ``concurrency`` has the default of what is measured."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="flashmoa bench router", description=__doc__, formatter_class=raw
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        help="requests at a time: per simulated engine (256), over all running ones (16)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of requests and of chance")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    simulation.add_options(parser)
    live.add_options(parser)
    options = parser.parse_args(arguments)
    if bool(options.engine) != bool(options.router):
        parser.error("running routers need both --engine URL and --router NAME=URL")
    if options.concurrency is None:
        options.concurrency = 16 if options.engine else 256
    return options
