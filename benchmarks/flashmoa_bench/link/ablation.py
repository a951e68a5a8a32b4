"""Measure the parts of streaming and of the intra-turn cache (FlashAgents §6.4, Table 1).

The pipelines are as in ``flashmoa bench handoff``, at one pace: sequential on stock SGLang (a
request for each pipeline, or all as one batch), and linked on FlashMoA without and with its
intra-turn cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Annotated

from flashmoa_bench.harness.command_line import Option, command, positive, positive_float
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.link.pipelines import PipelineRound, Ways, Workload, play_grid

# SGLang's default on the paper's GPU; on a CPU it is smaller. Stock SGLang computes a shared prefix
# again for each of the prompts that it starts at once, and this size limits their number.
_CHUNK = ("--chunked-prefill-size", "8192")
ROLES = (
    Role("stock", plugin=False, arguments=("--schedule-policy", "fcfs", *_CHUNK)),
    Role("streaming", plugin=True, arguments=("--flashmoa-intra-turn", "off", *_CHUNK)),
    Role("flashmoa", plugin=True, arguments=_CHUNK),
)
_VARIANTS: Ways = {
    "baseline": ("stock", "sequential"),
    "batched": ("stock", "batch"),
    "streaming": ("streaming", "linked"),
    "full": ("flashmoa", "linked"),
}
# Seconds in the paper's Table 1 (Qwen3-32B on one A100), at the paper's pace. With 200 upstream
# tokens, T has its floor of about 4 s.
_COLUMNS = ("baseline", "streaming", "full")
PAPER = {
    Workload(50, 1000, 200, 1): (4.46, 4.16, 4.11),
    Workload(50, 1000, 200, 8): (6.93, 4.11, 4.11),
    Workload(50, 2000, 200, 1): (4.77, 4.15, 4.11),
    Workload(50, 2000, 200, 8): (10.10, 5.32, 4.20),
}


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One row of Table 1, by variant; medians over rounds.

    Attributes:
        decode, floor: as in ``bench handoff``.
        duplicates: computed over unique prompt tokens; 1 means no duplicates.
    """

    prefix: Annotated[int, Column("prefix")]
    pipelines: Annotated[int, Column("pipelines")]
    decode: float
    floor: float
    seconds: Annotated[Mapping[str, float], Column("{}", "{:.2f}")]
    speedup: Annotated[Mapping[str, float], Column("{}/full", "{:.2f}x")]
    duplicates: Annotated[Mapping[str, float], Column("{} computed", "{:.2f}")]
    paper: Annotated[Mapping[str, float] | None, Column("paper {}", "{:.2f}")]

    @property
    def least(self) -> Annotated[float, Column("T_A + floor", "{:.2f}")]:
        return self.decode + self.floor


async def _measure(report: Report) -> None:
    options = report.options
    grid = [
        Workload(options.tps, prefix, options.upstream, pipelines)
        for prefix, pipelines in product(options.prefix, options.pipelines)
    ]
    async with report.connect(ROLES, max(workload.pool_tokens for workload in grid)) as engines:
        rows: list[AblationRow] = []
        played = play_grid(engines, grid, _VARIANTS, options.repeats, options.seed, report.console)
        async for workload, rounds, _overrun in played:
            rows.append(summarise_row(workload, rounds))
            report.write({"rows": rows})
    report.show(
        "Ablation: T in seconds, speed-ups, and the paper's T",
        rows,
        "baseline: stock, a request for each pipeline; batched: one request for all; "
        "streaming: linked, intra-turn cache off; full: linked, with it. T_A + floor: the least "
        "any overlap can reach. computed: prompt tokens over unique ones, each shared one counted "
        "once. paper: Qwen3-32B on one A100.",
    )
    report.save({"rows": rows})


def summarise_row(workload: Workload, rounds: Mapping[str, Sequence[PipelineRound]]) -> AblationRow:
    seconds = {name: median(each.seconds for each in group) for name, group in rounds.items()}
    unique, paper = workload.unique_tokens, PAPER.get(workload)
    return AblationRow(
        prefix=workload.prefix,
        pipelines=workload.concurrency,
        decode=workload.decode_seconds,
        floor=median(each.floor or 0.0 for each in rounds["full"]),
        seconds=seconds,
        duplicates={
            name: median(each.computed_tokens for each in group) / unique
            for name, group in rounds.items()
        },
        speedup={name: seconds[name] / seconds["full"] for name in ("baseline", "batched")},
        paper=dict(zip(_COLUMNS, paper, strict=True)) if paper else None,
    )


main = command(
    "ablation",
    __doc__,
    _measure,
    ROLES,
    Option("--prefix", positive, [1000, 2000], "tokens known beforehand"),
    Option("--pipelines", positive, [1, 8], "pipelines at once"),
    Option("--tps", positive_float, 50.0, "upstream tokens per second"),
    Option("--upstream", positive, 200, "upstream tokens"),
)
