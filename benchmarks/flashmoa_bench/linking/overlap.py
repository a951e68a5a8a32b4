"""How much of a handoff was hidden, of what can be (FlashAgents Eq. 2-6); pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flashmoa_bench.linking.pipelines import PipelineRound, Workload

LINKED = "linked"
# A cell in which there is hardly anything to hide says nothing about how well it is hidden.
WORTH_HIDING = 0.1
WELL_HIDDEN = 0.95


@dataclass(frozen=True, slots=True)
class HandoffCell:
    """One workload; medians over rounds, in seconds.

    Attributes:
        seconds: T of Eq. 6 by way: each baseline, and ``linked``.
        speedup: T of each baseline over T linked.
        decode: T_decode of A, as paced.
        prefill: what the better baseline adds to it, P_B = T_seq - T_A.
        floor: first token where all but the last upstream token and the suffix is cached.
        bound: min(decode, prefill - floor), Eq. 4.
        hidden: seconds hidden, T_seq - T_linked.
        hidden_fraction: of the bound; ``None`` where the bound is not above 0.
        late_tokens: prompt tokens left to compute when B's request came, linked.
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

    @property
    def sequential(self) -> float:
        """Return T of the better baseline."""
        return min(value for way, value in self.seconds.items() if way != LINKED)

    @property
    def is_worth_hiding(self) -> bool:
        return self.bound > WORTH_HIDING * self.sequential


def cell(workload: Workload, rounds: Mapping[str, Sequence[PipelineRound]]) -> HandoffCell:
    """Summarise the rounds of one workload; ``rounds`` are by way, ``linked`` among them."""
    seconds = {way: median(one.seconds for one in group) for way, group in rounds.items()}
    linked = seconds[LINKED]
    sequential = min(value for way, value in seconds.items() if way != LINKED)
    floor = median(one.floor or 0.0 for one in rounds[LINKED])
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
        late_tokens=median(one.late_tokens for one in rounds[LINKED]),
    )


@dataclass(frozen=True, slots=True)
class GridSummary:
    """All cells of a grid.

    Attributes:
        won: by baseline, cells at least as fast as it.
        speedups: by baseline, the least, the median and the greatest speed-up.
        worth_hiding: cells whose bound is above a tenth of the sequential time.
        well_hidden: of these, cells with a hidden fraction of at least 0.95.
    """

    cells: int
    won: Mapping[str, int]
    speedups: Mapping[str, tuple[float, float, float]]
    worth_hiding: int
    well_hidden: int


def summarise(cells: Sequence[HandoffCell]) -> GridSummary:
    by_way = {way: [one.speedup[way] for one in cells] for way in cells[0].speedup}
    worth = [one for one in cells if one.is_worth_hiding]
    return GridSummary(
        cells=len(cells),
        won={way: sum(value >= 1 for value in values) for way, values in by_way.items()},
        speedups={
            way: (min(values), median(values), max(values)) for way, values in by_way.items()
        },
        worth_hiding=len(worth),
        well_hidden=sum((one.hidden_fraction or 0) >= WELL_HIDDEN for one in worth),
    )
