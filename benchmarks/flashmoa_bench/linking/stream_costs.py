"""``StreamLoad``: what prompt streams cost the processes of an engine, and what that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from flashmoa_bench.harness.rounds import percentile


@dataclass(frozen=True, slots=True)
class Way:
    """Streams that are opened with ``known`` tokens, if any, and may grow."""

    known: int | None = None
    grows: bool = False

    def __str__(self) -> str:
        if self.known is None:
            return "no streams"
        return f"{self.known} tokens, {'growing' if self.grows else 'open'}"


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What the processes took during a measurement.

    Attributes:
        http_share: CPU seconds of the HTTP process by second.
        step_ms: CPU milliseconds of the scheduler by step of the decoding requests, without the
            computation of a modelled GPU's forwards.
        steps_per_second: such steps.
        increments_per_second: increments of all streams together.
        ahead: share of the streams' tokens that is prefilled in the end.
    """

    http_share: float
    step_ms: float
    steps_per_second: float
    increments_per_second: float
    ahead: float


def summarise(loads: Sequence[StreamLoad]) -> StreamLoad:
    """Return the median of each figure."""
    figures = [asdict(load) for load in loads]
    return StreamLoad(**{name: median(each[name] for each in figures) for name in figures[0]})


def increment_ms(load: StreamLoad, idle: StreamLoad) -> float | None:
    """Return the CPU milliseconds that the scheduler takes for an increment; ``None`` without any.

    Args: idle: the load of streams that do not grow.
    """
    if not load.increments_per_second:
        return None
    more = (load.step_ms - idle.step_ms) * load.steps_per_second
    return more / load.increments_per_second


def compare(
    rounds: Mapping[str, Sequence[StreamLoad]], lengths: Sequence[int]
) -> dict[str, list[float]]:
    """Return how many times as much the longest streams cost as the shortest, round by round.

    There is a figure for each process: the CPU time that increments add to the scheduler, by
    increment, and that appends add to the HTTP process. A round in which one of them is too small
    to be measured is left out. There are none of streams of one length.
    """
    short, long = min(lengths), max(lengths)
    if short == long:
        return {}
    found: dict[str, list[float]] = {"scheduler": [], "HTTP": []}
    for measured in zip(
        *(rounds[str(Way(known, grows))] for known in (short, long) for grows in (False, True)),
        strict=True,
    ):
        open_short, short_load, open_long, long_load = measured
        costs = {
            "scheduler": (
                increment_ms(short_load, open_short) or 0.0,
                increment_ms(long_load, open_long) or 0.0,
            ),
            "HTTP": (
                short_load.http_share - open_short.http_share,
                long_load.http_share - open_long.http_share,
            ),
        }
        for process, (one, other) in costs.items():
            if one > 0 and other > 0:
                found[process].append(other / one)
    return found


def describe(process: str, ratios: Sequence[float], lengths: Sequence[int]) -> str:
    """Return a sentence with the median of a process's ratios, and their spread."""
    what = f"{process}: growing streams of {max(lengths)} tokens against {min(lengths)}: "
    if not ratios:
        return what + "too little to be measured; give more --streams or longer --seconds"
    low, high = percentile(ratios, 0.25), percentile(ratios, 0.75)
    return what + (
        f"{median(ratios):.2f} times the CPU time; half of {len(ratios)} rounds between "
        f"{low:.2f} and {high:.2f}"
    )
