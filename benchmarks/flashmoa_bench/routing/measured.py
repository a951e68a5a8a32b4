"""Measure routers before modelled engines (MoE-Prefill §7, §8.2, Table 2).

N engines with FlashMoA's plugin score a mix's requests: taking turns, behind sglang-router
and smg (if installed), and behind FlashMoA's router. The engines publish KV events. Every cell, one
router and one seed, has a new router and empty caches. Routers take turns, seed by seed.

FlashMoA's router can be compared with the paper's rules, too (--patience 0). With --saturation,
engines wait for forwards that would hide transfers of experts. The modelled GPUs take no time for
transfers, so smaller forwards cost too little.

With --resume, cells in the file of --json are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

from flashmoa.engine import EngineClient
from flashmoa.engine.local import free_port
from flashmoa_bench.harness import routers
from flashmoa_bench.harness.command_line import RESUME, Option, command, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.modelled_gpus import read_devices, worst_overrun
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import (
    Key,
    alternate,
    measure_cells,
    measured_cells,
    percentile,
)
from flashmoa_bench.prefill.mix import MIXES
from flashmoa_bench.prefill.passes import (
    PrefillPass,
    PrefillRequest,
    play,
    prefill_sender,
    to_requests,
    unique_tokens,
)

IN_TURN = "round_robin"
# Shape of Qwen3-30B-A3B.
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
ROLES = (Role("engine_1", plugin=True, core=0), Role("engine_2", plugin=True, core=1))
# Options that may differ between a run and the run that it resumes.
_FREE = ("seeds", "routers")
# An engine's default for --flashmoa-saturation-wait, and the most that it takes, in seconds.
_WAIT, _LONGEST_WAIT = 0.2, 60.0


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """One router's figures for one seed.

    Attributes:
        unique: the fewest tokens to compute.
        overrun: delay of forwards over a modelled GPU's time, the largest of all engines.
    """

    router: str
    seed: int
    seconds: float
    tokens: int
    computed: int
    unique: int
    p50: float
    p99: float
    overrun: float = 0.0


async def _measure_all(report: Report) -> None:
    options = report.options
    cells = measured_cells(report, MeasuredCell, _FREE)
    found: dict[Key, MeasuredCell] = {(cell.router, cell.seed): cell for cell in cells}
    async with report.connect(make_roles(options), 776_000) as engines:
        order = alternate(len(options.seeds), options.routers)
        seeds = [seed for seed in options.seeds for _ in options.routers]
        todo = {
            cell: partial(_measure, engines, *cell, options)
            for cell in zip(order, seeds, strict=True)
            if cell not in found
        }
        if todo:  # A new process is slow at first.
            await _play(engines, IN_TURN, make_requests(options, -1)[:200], options)
        await measure_cells(todo, found, report)
    rows = summarise(list(found.values()), options.routers)
    report.show(f"Measured on modelled engines: {options.mix}", rows, left=("router",))
    report.save({"cells": list(found.values())})


def make_roles(options: argparse.Namespace) -> list[Role]:
    """Return the engines, on two cores in turn."""
    most, enough = str(options.forward), str(options.saturation)
    sizes = ("--chunked-prefill-size", most, "--max-prefill-tokens", most)
    # Engines count the seconds that prefills wait by this machine's clock.
    wait = min(_LONGEST_WAIT, _WAIT * options.device_slowdown)
    gate = ("--flashmoa-saturation", enough, "--flashmoa-saturation-wait", f"{wait:g}")
    return [
        Role(
            f"engine_{number + 1}",
            plugin=True,
            core=number % 2,
            optional=number >= len(ROLES),
            arguments=(*sizes, *gate, "--kv-events-config", _make_event_config()),
        )
        for number in range(options.engines)
    ]


def _make_event_config() -> str:
    return json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"})


def make_requests(options: argparse.Namespace, seed: int) -> list[PrefillRequest]:
    return to_requests(MIXES[options.mix].prompts(seed, options.share))


async def _measure(
    engines: Engines, router: str, seed: int, options: argparse.Namespace
) -> MeasuredCell:
    requests = make_requests(options, seed)
    before = await read_devices(engines.clients)
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
        overrun=worst_overrun(before, await read_devices(engines.clients)),
    )


async def _play(
    engines: Engines, router: str, requests: Sequence[PrefillRequest], options: argparse.Namespace
) -> PrefillPass:
    """Send all requests once, to engines with empty caches."""
    clients = list(engines.clients.values())
    for engine in clients:
        await engine.flush_cache()
    # Any two candidates will do.
    likeliest = {request.name: 0 for request in requests}
    limit = options.concurrency * len(clients)
    if router == IN_TURN:
        return await play([prefill_sender(each, likeliest) for each in clients], requests, limit)
    urls = [engine.url for engine in clients]
    async with (
        routers.start_router(router, urls, SHAPE) as url,
        EngineClient(url) as client,
    ):
        return await play([prefill_sender(client, likeliest)], requests, limit)


@dataclass(frozen=True, slots=True)
class RouterRow:
    """One router's medians over seeds.

    Attributes:
        gain, least, most: throughput over the first router's with the same seed; the median, and
            the extremes.
    """

    router: Annotated[str, Column("router")]
    seeds: Annotated[int, Column("seeds")]
    seconds: Annotated[float, Column("seconds", "{:.2f}")]
    tokens_per_second: Annotated[float, Column("tokens/s", "{:,.0f}")]
    gain: Annotated[float | None, Column("over first", "{:.3f}")]
    least: Annotated[float | None, Column("least", "{:.3f}")]
    most: Annotated[float | None, Column("most", "{:.3f}")]
    computed: Annotated[float, Column("computed", "{:.2f}")]
    p50: Annotated[float, Column("p50", "{:.2f} s")]
    p99: Annotated[float, Column("p99", "{:.2f} s")]


def summarise(cells: Sequence[MeasuredCell], routers: Sequence[str]) -> list[RouterRow]:
    """Return a row for each router with cells; all are compared with the first of ``routers``."""
    base = {cell.seed: cell.seconds for cell in cells if cell.router == routers[0]}
    rows: list[RouterRow] = []
    for router in dict.fromkeys([*routers, *(cell.router for cell in cells)]):
        own = [cell for cell in cells if cell.router == router]
        gains = [base[cell.seed] / cell.seconds for cell in own if cell.seed in base]
        rows.append(
            RouterRow(
                router=router,
                seeds=len(own),
                seconds=median(cell.seconds for cell in own),
                tokens_per_second=median(cell.tokens / cell.seconds for cell in own),
                gain=median(gains) if gains else None,
                least=min(gains, default=None),
                most=max(gains, default=None),
                computed=median(cell.computed / cell.unique for cell in own),
                p50=median(cell.p50 for cell in own),
                p99=median(cell.p99 for cell in own),
            )
        )
    return rows


_ROUTERS = [IN_TURN, *routers.installed_routers()]
main = command(
    "router_measured",
    __doc__,
    _measure_all,
    ROLES,
    Option("--mix", str, "table-2", "%(default)s", choices=tuple(MIXES)),
    Option("--engines", positive, 8, "number (%(default)s)"),
    Option("--seeds", int, [0], "of the requests (0)"),
    Option("--share", float, 1.0, "part of the mix's requests (%(default)g)"),
    Option(
        "--routers",
        str,
        _ROUTERS,
        "compared with the first; by default all, ours with its default rules",
        choices=(*_ROUTERS, routers.OUR_CASCADE),
    ),
    Option("--forward", positive, 8192, "most tokens of a forward (%(default)s)"),
    Option("--saturation", int, 0, "tokens that engines' prefills wait for (0: none wait)"),
    Option("--concurrency", positive, 64, "requests at a time, per engine (64)"),
    RESUME,
    repeats=False,
    defaults={
        "shape": "test",
        "device": "h200_sxm",
        "device_model": ["Qwen/Qwen3-30B-A3B"],
    },
)
