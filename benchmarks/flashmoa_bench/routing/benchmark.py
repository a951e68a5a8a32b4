"""Compare routing policies on simulated engines (MoE-Prefill §7, §8.2, Table 2), or real routers.

By default engines with Qwen3-30B-A3B are simulated, whose forwards take what NVIDIA measured on
an H200, and four mixes of prefill-only requests with synthetic texts are replayed over 8 and over
32 of them: the paper's, long documents, short reviews and one hot prefix. The policies are taking
turns, the rules of sglang-router 0.3.2, smg 1.13 and Dynamo 1.6, and FlashMoA's: with and without
the engines' KV events, with the paper's rule, by which no request waits for a saturated engine, and
in two routers that get requests in turn and know nothing of each other. Nothing is computed and
nothing is timed; the same seed gives the same figures. ``router-measured`` measures the same.

With --engine and --router, running engines answer requests with one token each. Some requests are
about a few documents, others have nothing in common. Every round begins with empty caches and goes
through each router in turn. The simulator replays the same prompts, with engines that have the same
caches and forwards. Its seconds are arbitrary, but its ranking of the policies is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import anyio

from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.routing import live, simulation


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench router`` and return the exit status."""
    options = parse(arguments)
    if options.engine:
        anyio.run(live.measure, options)
    else:
        simulation.measure(options)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; the default of ``--concurrency`` depends on the kind of engines."""
    parser = make_parser("router", __doc__)
    parser.add_argument(
        "--concurrency",
        type=positive,
        help="requests at a time: per simulated engine (64), over all running ones (16)",
    )
    simulation.add_options(parser)
    live.add_options(parser)
    options = parser.parse_args(arguments)
    if bool(options.engine) != bool(options.router):
        parser.error("running routers need both --engine URL and --router NAME=URL")
    if options.concurrency is None:
        options.concurrency = 16 if options.engine else 64
    return options
