"""Compare routing policies on simulated engines, which take the times of a measured GPU.

Nothing is computed and nothing is timed; the same seed gives the same figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console

from flashmoa.router.blocks import BLOCK_TOKENS, token_blocks
from flashmoa.router.flops import true_flops
from flashmoa.router.policies import SATURATION_MARGIN, CacheAware, Policy, RoundRobin
from flashmoa.router.prefix_aware import PrefixAware
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import Report, make_table, progress_bar
from flashmoa_bench.harness.rounds import percentile
from flashmoa_bench.moa.least_times import tabulated_times
from flashmoa_bench.prefill.mix import MixRequest
from flashmoa_bench.routing.engines import Machine, ReplayOutcome, best_hit_rate, replay
from flashmoa_bench.routing.mixes import MIXES
from flashmoa_bench.routing.rivals import Dynamo, Smg
from flashmoa_bench.routing.several import SeveralRouters

IN_TURN, OURS, SILENT = "round_robin", "prefix_aware", "prefix_aware, no events"
STOCK, SMG, DYNAMO = "sglang-router 0.3.2", "smg 1.13", "Dynamo 1.6"
SEVERAL = "prefix_aware, two routers"
PAPER = "prefix_aware, the paper's rule"
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
POLICIES: dict[str, Callable[[int], Policy]] = {
    IN_TURN: lambda _seed: RoundRobin(),
    STOCK: lambda seed: CacheAware(seed=seed),
    SMG: lambda seed: Smg(seed=seed),
    DYNAMO: lambda seed: Dynamo(seed=seed),
    OURS: lambda _seed: PrefixAware(),
    SILENT: lambda _seed: PrefixAware(),
    PAPER: lambda _seed: PrefixAware(patience=0),
    SEVERAL: lambda _seed: SeveralRouters(2),
}
RIVALS = (STOCK, SMG, DYNAMO)


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one policy over one mix with one seed.

    Attributes:
        seconds: until all requests were answered.
        throughput: prompt tokens per second.
        duplicates: number of tokens that were computed over the fewest possible.
        p50, p99: percentiles of a request's seconds.
        gain: throughput over that of :data:`IN_TURN`.
        share: throughput over the bound, the most that any policy could reach.
    """

    mix: str
    engines: int
    policy: str
    seed: int
    seconds: float
    throughput: float
    duplicates: float
    p50: float
    p99: float
    gain: float
    share: float
    imbalance: float


def measure(options: argparse.Namespace) -> None:
    """Replay all mixes with every policy, print the tables and write the report."""
    report = Report("router", options)
    report.print_head()
    runs: list[Run] = []
    policies = list(dict.fromkeys((IN_TURN, *options.policies)))
    with progress_bar(report.console) as bars:
        bar = bars.add_task("", total=len(options.mixes) * len(options.seeds))
        for mix in options.mixes:
            for seed in options.seeds:
                bars.update(bar, description=f"{mix}, seed {seed}")
                runs += run_all(mix, seed, policies, options)
                report.write({"runs": [asdict(each) for each in runs]})
                bars.advance(bar)
    show(runs, report.console)
    report.save({"runs": [asdict(each) for each in runs]})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulation."""
    group = parser.add_argument_group("the requests")
    group.add_argument(
        "--mixes", nargs="+", choices=tuple(MIXES), default=list(MIXES), help="all by default"
    )
    group.add_argument(
        "--share", type=float, default=1.0, help="part of each mix's requests (%(default)g)"
    )
    group.add_argument(
        "--seeds", type=int, nargs="+", default=list(range(5)), help="0 to 4 by default"
    )
    engine = parser.add_argument_group("the simulated engines")
    engine.add_argument(
        "--engines", type=positive, nargs="+", default=[8, 32], help="numbers of engines (8, 32)"
    )
    engine.add_argument(
        "--policies", nargs="+", choices=tuple(POLICIES), default=list(POLICIES), metavar="NAME"
    )
    engine.add_argument("--device", default="h200_sxm", metavar="GPU", help="%(default)s")
    engine.add_argument(
        "--batch-tokens", type=positive, default=8192, help="most tokens of a forward (%(default)s)"
    )
    engine.add_argument(
        "--kv-tokens", type=positive, default=776_000, help="tokens of a cache (%(default)s)"
    )
    engine.add_argument(
        "--margin", type=float, default=SATURATION_MARGIN, help="kappa of the saturation threshold"
    )


def run_all(mix: str, seed: int, policies: Sequence[str], options: argparse.Namespace) -> list[Run]:
    """Replay one mix with one seed, with each policy over each number of engines.

    The first policy is :data:`IN_TURN`, with which the others are compared.
    """
    requests = [
        MixRequest(one.name, one.dataset, token_blocks(one.tokens))
        for one in MIXES[mix].prompts(seed, options.share)
    ]
    least_computed = 1 - best_hit_rate(one.blocks for one in requests)
    machine = make_machine(options)
    least = least_seconds(requests, machine)
    runs: list[Run] = []
    for engines in options.engines:
        bound = max(least / engines, longest_seconds(requests, machine))
        base = 0.0
        for policy in policies:
            outcome = run(policy, seed, requests, engines, options)
            base = base or outcome.seconds
            runs.append(
                Run(
                    mix=mix,
                    engines=engines,
                    policy=policy,
                    seed=seed,
                    seconds=outcome.seconds,
                    throughput=outcome.throughput,
                    duplicates=(1 - outcome.hit_rate) / least_computed,
                    p50=percentile(outcome.waits, 0.5),
                    p99=percentile(outcome.waits, 0.99),
                    gain=base / outcome.seconds,
                    share=bound / outcome.seconds,
                    imbalance=outcome.imbalance,
                )
            )
    return runs


def make_machine(options: argparse.Namespace, *, reports: bool = True) -> Machine:
    """Return an engine with Qwen3-30B-A3B. Raises: EngineError if the GPU has no times."""
    return Machine(
        measure=true_flops(SHAPE),
        times=tabulated_times(options.device, "Qwen/Qwen3-30B-A3B").prefill,
        batch_tokens=options.batch_tokens,
        cache_blocks=options.kv_tokens // BLOCK_TOKENS,
        reports=reports,
    )


def run(
    policy: str,
    seed: int,
    requests: Sequence[MixRequest],
    engines: int,
    options: argparse.Namespace,
) -> ReplayOutcome:
    """Replay requests with one policy."""
    machine = make_machine(options, reports=policy != SILENT)
    return replay(
        requests,
        POLICIES[policy](seed),
        {f"engine {number}": machine for number in range(engines)},
        saturation=int(options.margin * machine.batch_tokens),
        concurrency=options.concurrency * engines,
    )


def least_seconds(requests: Sequence[MixRequest], machine: Machine) -> float:
    """Return the seconds of one engine that computes all requests, each shared token once.

    It has them all at once, so its forwards are full, and its cache forgets nothing. No number of
    engines takes less time together.
    """
    unlimited = Machine(machine.measure, machine.times, machine.batch_tokens, 1 << 40)
    one = {"one": unlimited}
    return replay(requests, RoundRobin(), one, concurrency=len(requests)).seconds


def longest_seconds(requests: Sequence[MixRequest], machine: Machine) -> float:
    """Return the seconds of the longest prompt alone, whose chunks follow each other."""
    longest = max(request.blocks.length for request in requests)
    starts = range(0, longest, machine.batch_tokens)
    return sum(
        machine.times(((start, min(machine.batch_tokens, longest - start)),)) for start in starts
    )


def show(runs: Sequence[Run], console: Console) -> None:
    """Print a table for each mix and number of engines, with medians over seeds."""
    groups: dict[tuple[str, int], dict[str, list[Run]]] = {}
    for one in runs:
        groups.setdefault((one.mix, one.engines), {}).setdefault(one.policy, []).append(one)
    for (mix, engines), policies in groups.items():
        _show_group(f"{mix}, {engines} engines, simulated", policies, console)


def _show_group(title: str, policies: Mapping[str, Sequence[Run]], console: Console) -> None:
    names = ("policy", "tokens/s", "over in turn", "of the bound", "computed", "p50", "p99")
    table = make_table(title, *names, left=("policy",))
    for policy, group in policies.items():
        gains = [one.gain for one in group]
        table.add_row(
            policy,
            f"{median(one.throughput for one in group):,.0f}",
            f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})",
            f"{median(one.share for one in group):.0%}",
            f"{median(one.duplicates for one in group):.2f}",
            f"{median(one.p50 for one in group):.2f} s",
            f"{median(one.p99 for one in group):.2f} s",
        )
    console.print(table)
