"""Compare routing policies on simulated engines with the shape of Qwen3-235B-A22B.

Nothing is computed and nothing is timed; the same seed gives the same figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from flashmoa.router.blocks import BLOCK_TOKENS
from flashmoa.router.flops import true_flops
from flashmoa.router.policies import SATURATION_MARGIN, CacheAware, Policy, Random, RoundRobin
from flashmoa.router.prefix_aware import PrefixAware
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import Report, make_table, progress_bar
from flashmoa_bench.prefill.mix import TABLE_2, MixRequest, mix
from flashmoa_bench.routing.engines import Machine, ReplayOutcome, best_hit_rate, replay
from flashmoa_bench.routing.several import SeveralRouters

OURS, SILENT = "prefix_aware", "prefix_aware, no events"
SEVERAL = "prefix_aware, two routers"
PAPER = "prefix_aware, the paper's rule"
# Qwen3-235B-A22B.
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
POLICIES: dict[str, Callable[[int], Policy]] = {
    "random": Random,
    "round_robin": lambda _seed: RoundRobin(),
    "cache_aware": lambda seed: CacheAware(seed=seed),
    PAPER: lambda _seed: PrefixAware(patience=0),
    SILENT: lambda _seed: PrefixAware(),
    OURS: lambda _seed: PrefixAware(),
    SEVERAL: lambda _seed: SeveralRouters(2),
}


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """The figures of one policy (see :class:`ReplayOutcome`); ``speedup``: over policy random."""

    engines: int
    policy: str
    throughput: float
    speedup: float
    hit_rate: float
    seconds: float
    imbalance: float
    steps: int


def measure(options: argparse.Namespace) -> None:
    """Replay the mix with every policy, print the table and write the report."""
    report = Report("router", options)
    report.print_head()
    requests = mix(options.scale, options.spread, options.seed)
    rows: list[PolicyRow] = []
    with progress_bar(report.console) as bars:
        bar = bars.add_task("", total=len(options.engines) * len(POLICIES))
        for engines in options.engines:
            outcomes: dict[str, ReplayOutcome] = {}
            for policy in POLICIES:
                bars.update(bar, description=f"{engines} engines, {policy}")
                outcomes[policy] = run(policy, requests, engines, options)
                bars.advance(bar)
            rows += summarise(engines, outcomes)
    best = best_hit_rate(request.blocks for request in requests)
    show(rows, requests, best, report.console)
    report.save(
        {
            "rows": [asdict(row) for row in rows],
            "best_hit_rate": best,
            "datasets": [asdict(dataset) for dataset in TABLE_2],
        },
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulation."""
    group = parser.add_argument_group("the mix of requests")
    group.add_argument(
        "--scale", type=float, default=0.4, help="share of Table 2's 73,800 requests"
    )
    group.add_argument(
        "--spread", type=float, default=0.05, help="part of the mix in which siblings come"
    )
    engine = parser.add_argument_group("the simulated engines")
    engine.add_argument(
        "--engines", type=positive, nargs="+", default=[2, 8], help="number of engines"
    )
    engine.add_argument("--tflops", type=float, default=680.0, help="speed of an engine")
    engine.add_argument("--batch-tokens", type=positive, default=16384, help="tokens of a forward")
    engine.add_argument("--kv-tokens", type=positive, default=400_000, help="tokens of a cache")
    engine.add_argument(
        "--floor",
        type=float,
        default=0.56,
        help="least seconds of a forward, for the transfer of weights",
    )
    engine.add_argument(
        "--margin", type=float, default=SATURATION_MARGIN, help="kappa of the saturation threshold"
    )


def run(
    policy: str, requests: Sequence[MixRequest], engines: int, options: argparse.Namespace
) -> ReplayOutcome:
    """Replay the mix with one policy."""
    machine = Machine(
        measure=true_flops(SHAPE),
        rate=options.tflops * 1e12,
        batch_tokens=options.batch_tokens,
        cache_blocks=options.kv_tokens // BLOCK_TOKENS,
        floor=options.floor,
        reports=policy != SILENT,
    )
    full = machine.measure.work(0, machine.batch_tokens) / machine.rate
    # A forward that waits for weights longer than it computes has room for more tokens.
    exposed = max(1.0, machine.floor / full)
    return replay(
        requests,
        POLICIES[policy](options.seed),
        {f"engine {number}": replace(machine) for number in range(engines)},
        saturation=int(options.margin * exposed * machine.batch_tokens),
        concurrency=options.concurrency * engines,
    )


def summarise(engines: int, outcomes: dict[str, ReplayOutcome]) -> Iterator[PolicyRow]:
    """Yield a row for each policy; ``outcomes`` are by policy, ``random`` among them."""
    base = outcomes["random"].throughput
    for policy, outcome in outcomes.items():
        yield PolicyRow(
            engines=engines,
            policy=policy,
            throughput=outcome.throughput,
            speedup=outcome.throughput / base,
            hit_rate=outcome.hit_rate,
            seconds=outcome.seconds,
            imbalance=outcome.imbalance,
            steps=outcome.steps,
        )


def show(
    rows: Sequence[PolicyRow], requests: Sequence[MixRequest], best: float, console: Console
) -> None:
    """Print the table."""
    tokens = sum(request.blocks.length for request in requests)
    title = f"{len(requests):,} requests, {tokens / 1e6:.1f}M tokens, simulated"
    names = ("engines", "policy", "tokens/s", "of random", "hits", "makespan", "imbalance")
    table = make_table(title, *names, left=("policy",))
    for row in rows:
        table.add_row(
            str(row.engines),
            row.policy,
            f"{row.throughput:,.0f}",
            f"{row.speedup:.2f}",
            f"{row.hit_rate:.1%}",
            f"{row.seconds:,.0f} s",
            f"{row.imbalance:.2f}",
        )
    console.print(table)
    console.print(f"One engine whose cache forgets nothing would hit {best:.1%}.\n")
