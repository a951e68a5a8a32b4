"""Measure routers before modelled engines (MoE-Prefill §7, §8.2, Table 2).

The requests of one mix are scored over N engines with FlashMoA's plugin: with the engines in turn,
behind sglang-router and smg (if they are installed), behind FlashMoA's router with the rule of
NVIDIA Dynamo's, and with its own. The engines publish KV events. Every cell, one router and one
seed, has a new router and empty caches.

With --resume, what the file of --json has is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa.engine.local import free_port
from flashmoa_bench.harness import routers
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import FIRST_ID, ID_COUNT
from flashmoa_bench.harness.rounds import Key, measure_cells, measured_cells, percentile, to_results
from flashmoa_bench.prefill.passes import (
    PrefillPass,
    PrefillRequest,
    PrefillSender,
    play,
    unique_tokens,
)
from flashmoa_bench.routing.mixes import MIXES

IN_TURN = "round_robin"
# Qwen3-30B-A3B.
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
# Most tokens of a forward, and tokens of an engine's cache.
_BATCH_TOKENS, _KV_TOKENS = 8192, 776_000
ROLES = (Role("engine_1", plugin=True, core=0), Role("engine_2", plugin=True, core=1))
# Options in which a run may differ from the earlier one that it goes on with.
_FREE = ("json", "resume", "seeds", "routers")


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """What one router took for the requests of one seed.

    Attributes:
        tokens, computed, unique: prompt tokens; those of them that the engines computed; the fewest
            that they could compute.
        p50, p99: percentiles of a request's seconds.
    """

    router: str
    seed: int
    seconds: float
    tokens: int
    computed: int
    unique: int
    p50: float
    p99: float


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("router_measured", __doc__, ROLES, repeats=False)
    known = [IN_TURN, *routers.installed_routers()]
    parser.set_defaults(shape="test", device="h200_sxm", device_model=["Qwen/Qwen3-30B-A3B"])
    parser.add_argument("--mix", choices=tuple(MIXES), default="table-2", help="%(default)s")
    parser.add_argument("--engines", type=positive, default=8, help="number (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the requests (0)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="part of the mix's requests (%(default)g)"
    )
    parser.add_argument(
        "--routers", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known)
    )
    parser.add_argument(
        "--concurrency", type=positive, default=64, help="requests at a time, per engine (64)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the file of --json")
    options = parser.parse_args(arguments)
    if options.resume and options.json is None:
        parser.error("--resume needs --json FILE, the file to go on with")
    anyio.run(_main, options)
    return 0


async def _main(options: argparse.Namespace) -> None:
    report = Report("router_measured", options)
    found: dict[Key, MeasuredCell] = {}
    if options.resume:
        for each in measured_cells(options.json, report.settings, _FREE):
            cell = MeasuredCell(**each)
            found[cell.router, cell.seed] = cell
    async with report.connect(make_roles(options), _KV_TOKENS) as engines:
        todo = {
            (router, seed): partial(_measure, engines, router, seed, options)
            for seed in options.seeds
            for router in options.routers
            if (router, seed) not in found
        }
        if todo:  # Processes that have not served anything are slow at first.
            await _play(engines, IN_TURN, make_requests(options, -1)[:200], options)
        await measure_cells(todo, found, report)
    show(list(found.values()), report.console)
    report.save(to_results(list(found.values())))


def make_roles(options: argparse.Namespace) -> list[Role]:
    """Return the engines, on two cores in turn."""
    tokens = str(_BATCH_TOKENS)
    sizes = ("--chunked-prefill-size", tokens, "--max-prefill-tokens", tokens)
    return [
        Role(
            f"engine_{number + 1}",
            plugin=True,
            core=number % 2,
            optional=number >= len(ROLES),
            arguments=(*sizes, "--kv-events-config", _make_event_config()),
        )
        for number in range(options.engines)
    ]


def _make_event_config() -> str:
    return json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"})


def make_requests(options: argparse.Namespace, seed: int) -> list[PrefillRequest]:
    """Return the requests of the mix with the token ids of a tiny model."""
    return [
        PrefillRequest(prompt.name, [FIRST_ID + token % ID_COUNT for token in prompt.tokens])
        for prompt in MIXES[options.mix].prompts(seed, options.share)
    ]


async def _measure(
    engines: Engines, router: str, seed: int, options: argparse.Namespace
) -> MeasuredCell:
    requests = make_requests(options, seed)
    done = await _play(engines, router, requests, options)
    waits = [answer.seconds for answer in done.answers.values()]
    return MeasuredCell(
        router=router,
        seed=seed,
        seconds=done.seconds,
        tokens=done.prompt_tokens,
        computed=done.computed_tokens,
        unique=unique_tokens(requests),
        p50=percentile(waits, 0.5),
        p99=percentile(waits, 0.99),
    )


async def _play(
    engines: Engines, router: str, requests: Sequence[PrefillRequest], options: argparse.Namespace
) -> PrefillPass:
    """Send all requests once, to engines with empty caches."""
    clients = list(engines.clients.values())
    for engine in clients:
        await engine.flush_cache()
    # Which answers are scored does not matter here.
    likeliest = {request.name: 0 for request in requests}
    limit = options.concurrency * len(clients)
    if router == IN_TURN:
        return await play([PrefillSender(each, likeliest) for each in clients], requests, limit)
    urls = [engine.url for engine in clients]
    async with (
        routers.start_router(router, urls, SHAPE) as url,
        EngineClient(url) as client,
    ):
        return await play([PrefillSender(client, likeliest)], requests, limit)


def show(cells: Sequence[MeasuredCell], console: Console) -> None:
    """Print the medians over the seeds; gains are over taking turns with the same seed."""
    base = {cell.seed: cell.seconds for cell in cells if cell.router == IN_TURN}
    names = ("router", "seeds", "tokens/s", "over in turn", "computed", "p50", "p99")
    table = make_table("Measured on modelled engines", *names, left=("router",))
    for router in dict.fromkeys(cell.router for cell in cells):
        own = [cell for cell in cells if cell.router == router]
        gains = [base[cell.seed] / cell.seconds for cell in own if cell.seed in base]
        table.add_row(
            router,
            str(len(own)),
            f"{median(cell.tokens / cell.seconds for cell in own):,.0f}",
            f"{median(gains):.2f}" if gains else "",
            f"{median(cell.computed / cell.unique for cell in own):.2f}",
            f"{median(cell.p50 for cell in own):.2f} s",
            f"{median(cell.p99 for cell in own):.2f} s",
        )
    console.print(table)
