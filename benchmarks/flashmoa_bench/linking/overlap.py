"""Compute how much of a handoff was hidden, and how much could be (FlashAgents Eq. 2-6); pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flashmoa_bench.linking.pipelines import PipelineRound, Workload

LINKED = "linked"
# A cell with hardly anything to hide says nothing about how well it is hidden. The bound must be
# above this share of the sequential time.
WORTH_HIDING = 0.1
WELL_HIDDEN = 0.95


@dataclass(frozen=True, slots=True)
class HandoffCell:
    """The figures of one workload; medians over rounds, in seconds.

    Attributes:
        seconds: T of Eq. 6, by way: each baseline, and ``linked``.
        speedup: T of each baseline over T linked.
        decode: T_decode of A, as paced.
        prefill: time that the better baseline adds to it, P_B = T_seq - T_A.
        floor: time to B's first token if everything before A's last token is cached.
        bound: min(decode, prefill - floor), Eq. 4.
        hidden: time that linking hides, T_seq - T_linked.
        hidden_fraction: ``hidden`` over ``bound``; ``None`` unless the bound is above 0.
        late_tokens: prompt tokens left to compute when B's request came, linked.
        overrun: share of a modelled GPU's time by which forwards were computed too late.
    """

    workload: Workload
    seconds: Mapping[str, float]
    speedup: Mapping[str, float]
    decode: float
    prefill: float
    floor: float
    bound: float
    hidden: float
    hidden_fraction: float | None
    late_tokens: float
    overrun: float = 0.0

    @property
    def sequential(self) -> float:
        """Return T of the better baseline."""
        return min(value for way, value in self.seconds.items() if way != LINKED)

    @property
    def is_worth_hiding(self) -> bool:
        return self.bound > WORTH_HIDING * self.sequential


def summarise_cell(
    workload: Workload, rounds: Mapping[str, Sequence[PipelineRound]], overrun: float = 0.0
) -> HandoffCell:
    """Summarise the rounds of one workload; ``rounds`` are by way, ``linked`` among them."""
    seconds = {way: median(each.seconds for each in group) for way, group in rounds.items()}
    linked = seconds[LINKED]
    sequential = min(value for way, value in seconds.items() if way != LINKED)
    floor = median(each.floor or 0.0 for each in rounds[LINKED])
    decode = workload.decode_seconds
    prefill = sequential - decode
    bound = min(decode, prefill - floor)
    hidden = sequential - linked
    return HandoffCell(
        workload=workload,
        seconds=seconds,
        speedup={way: value / linked for way, value in seconds.items() if way != LINKED},
        decode=decode,
        prefill=prefill,
        floor=floor,
        bound=bound,
        hidden=hidden,
        hidden_fraction=hidden / bound if bound > 0 else None,
        late_tokens=median(each.late_tokens for each in rounds[LINKED]),
        overrun=overrun,
    )


@dataclass(frozen=True, slots=True)
class GridSummary:
    """The figures of all cells of a grid.

    Attributes:
        cells: number of cells.
        won: by baseline, the number of cells in which linking is at least as fast.
        speedups: by baseline, the least, the median and the greatest speed-up.
        worth_hiding: number of cells whose bound is above a tenth of the sequential time.
        well_hidden: number of these cells with a hidden fraction of at least 0.95.
    """

    cells: int
    won: Mapping[str, int]
    speedups: Mapping[str, tuple[float, float, float]]
    worth_hiding: int
    well_hidden: int


def summarise_grid(cells: Sequence[HandoffCell]) -> GridSummary:
    by_way = {way: [cell.speedup[way] for cell in cells] for way in cells[0].speedup}
    worth = [cell for cell in cells if cell.is_worth_hiding]
    return GridSummary(
        cells=len(cells),
        won={way: sum(value >= 1 for value in values) for way, values in by_way.items()},
        speedups={
            way: (min(values), median(values), max(values)) for way, values in by_way.items()
        },
        worth_hiding=len(worth),
        well_hidden=sum((cell.hidden_fraction or 0) >= WELL_HIDDEN for cell in worth),
    )
