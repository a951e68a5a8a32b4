"""Compute and print the figures of ``flashmoa bench moa-latency``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.modelled_gpus import TOLERATED_SHARE
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.moa.latency_ways import BASE, LatencyAnswer, LatencyWay


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """The figures of one way; medians and means are over its questions.

    Attributes:
        seconds, first_token: medians, in seconds.
        relative: median of a question's seconds over those of the same question all-to-all.
        second, relative_second: mean seconds of the second layer's agents, and over all-to-all's.
        of_least: median share of a question's time in which the agents on its critical path decode.
        of_computed: median of what cost tables add up to over a question's seconds; ``None`` where
            they cannot (early exit), or there are none.
        computed, relative_computed: mean tokens that engines computed, and over all-to-all's.
        gpu_seconds: mean seconds of all GPUs' forwards.
        prompts: mean prompt tokens by layer and kind.
        left: share of agents that were left out, by layer and size.
        quality: mean Q of a decision.
        decision: mean seconds of a decision.
        deciding: mean share of a question's time by which decisions delayed it.
        overran: number of answers in which a GPU's forwards were computed too late.
    """

    way: str
    questions: int
    seconds: float
    first_token: float
    relative: float | None
    second: float
    relative_second: float | None
    of_least: float
    of_computed: float | None
    computed: float | None
    relative_computed: float | None
    gpu_seconds: float
    prompts: Mapping[str, Mapping[str, float | None]]
    left: Mapping[str, float]
    quality: float | None
    decision: float | None
    deciding: float | None
    paper: float | None
    overran: int


def summarise(
    ways: Sequence[LatencyWay],
    answers: Sequence[LatencyAnswer],
    computed: Mapping[tuple[str, int], float],
) -> list[LatencyRow]:
    """Return the figures of each way that has answers.

    Args:
        computed: what cost tables add up to, in seconds, by way and question.
    """
    by_way: dict[str, list[LatencyAnswer]] = {}
    for answer in answers:
        by_way.setdefault(answer.way, []).append(answer)
    base = {answer.question: answer for answer in by_way.get(BASE, ())}
    return [
        _summarise_way(way, by_way[way.name], base, computed) for way in ways if way.name in by_way
    ]


def _summarise_way(
    way: LatencyWay,
    answers: Sequence[LatencyAnswer],
    base: Mapping[int, LatencyAnswer],
    computed: Mapping[tuple[str, int], float],
) -> LatencyRow:
    def over_base(value: Callable[[LatencyAnswer], float | None]) -> float | None:
        pairs = [(value(one), value(base[one.question])) for one in answers if one.question in base]
        ratios = [one / other for one, other in pairs if one is not None and other]
        return median(ratios) if ratios else None

    tables = [
        computed[key] / answer.seconds
        for answer in answers
        if (key := (answer.way, answer.question)) in computed
    ]
    decisions = [decision for answer in answers for decision in answer.decisions]
    deciding = [each.deciding / each.seconds for each in answers if each.deciding is not None]
    return LatencyRow(
        way.name,
        len(answers),
        seconds=median(answer.seconds for answer in answers),
        first_token=median(answer.first_token for answer in answers),
        relative=over_base(lambda answer: answer.seconds),
        second=fmean(answer.second for answer in answers),
        relative_second=over_base(lambda answer: answer.second),
        of_least=median(answer.least / answer.seconds for answer in answers),
        of_computed=median(tables) if tables else None,
        computed=_mean([answer.computed for answer in answers]),
        relative_computed=over_base(lambda answer: answer.computed),
        gpu_seconds=fmean(answer.gpus.seconds for answer in answers),
        prompts=_mean_prompts(answers),
        left=_left_shares(answers),
        quality=_mean([score for _, score, _, _ in decisions]),
        decision=_mean([seconds for *_, seconds in decisions]),
        deciding=_mean(deciding),
        paper=way.paper,
        overran=sum(answer.gpus.overrun > TOLERATED_SHARE for answer in answers),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _mean_prompts(answers: Sequence[LatencyAnswer]) -> dict[str, dict[str, float | None]]:
    layers = dict.fromkeys(layer for answer in answers for layer in sorted(answer.prompts))
    kinds = ("prompt", "streamed", "cached", "late")
    return {
        layer: {
            kind: _mean([one.prompts[layer][kind] for one in answers if layer in one.prompts])
            for kind in kinds
        }
        for layer in layers
    }


def _left_shares(answers: Sequence[LatencyAnswer]) -> dict[str, float]:
    asked, left = Counter[str](), Counter[str]()
    for answer in answers:
        asked.update(answer.asked)
        left.update(answer.left)
    return {agents: left[agents] / count for agents, count in sorted(asked.items()) if left[agents]}


def show(rows: Sequence[LatencyRow], console: Console) -> None:
    """Print all tables, and explain their columns."""
    console.print(_latency_table(rows))
    console.print(
        "  seconds, first token: of a question, medians. In brackets: over all-to-all, question by "
        "question.\n  paper: Faster-MoA §5.3, at most. 2nd layer: mean of its agents, from the end "
        "of what they read.\n  least: share of the time in which the agents on the critical path "
        "decode. tables: what the cost tables\n  add up to without HTTP and scheduling, over the "
        "time. computed: tokens of prompts and answers.\n  GPU s: all GPUs' forwards.\n",
        highlight=False,
    )
    console.print(_prompt_table(rows))
    console.print(
        "  streamed: computed by prompt streams before the request came; cached: by others; late: "
        "after it came.\n",
        highlight=False,
    )
    if any(row.deciding is not None for row in rows):
        console.print(_exit_table(rows))
        console.print(
            "  left out: share of the agents of that layer and size. deciding: share of a "
            "question's time by\n  which decisions delayed it. Q and one decision are means.\n",
            highlight=False,
        )
    for row in rows:
        if row.overran:
            console.print(f"{row.way}: {row.overran} answers in which a GPU was too late")


def _latency_table(rows: Sequence[LatencyRow]) -> Table:
    table = make_table(
        "Latency on modelled GPUs",
        *("", "questions", "seconds", "paper", "first token", "2nd layer", "least", "tables"),
        *("computed", "GPU s"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        table.add_row(
            row.way,
            f"{row.questions}",
            f"{row.seconds:.2f}{_in_brackets(row.relative)}",
            _format_change(row.paper),
            f"{row.first_token:.2f}",
            f"{row.second:.2f}{_in_brackets(row.relative_second)}",
            f"{row.of_least:.0%}",
            _format(row.of_computed, ".0%"),
            f"{_format(row.computed, '.0f')}{_in_brackets(row.relative_computed)}",
            f"{row.gpu_seconds:.1f}",
        )
    return table


def _prompt_table(rows: Sequence[LatencyRow]) -> Table:
    table = make_table(
        "Prompts by layer, tokens per question",
        *("", "layer", "prompt", "streamed", "cached", "late"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        for number, (layer, counts) in enumerate(row.prompts.items()):
            cells = (_format(counts[kind], ".0f") for kind in counts)
            table.add_row("" if number else row.way, layer, *cells)
    return table


def _exit_table(rows: Sequence[LatencyRow]) -> Table:
    agents = sorted({name for row in rows for name in row.left})
    table = make_table(
        "Early exit: agents left out, by layer and size",
        *("", *agents, "Q", "one decision", "deciding"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        if row.deciding is not None:
            table.add_row(
                row.way,
                *(_format(row.left.get(name), ".0%") for name in agents),
                _format(row.quality, ".2f"),
                f"{1000 * row.decision:.0f} ms" if row.decision is not None else "",
                f"{row.deciding:.2%}",
            )
    return table


def _in_brackets(ratio: float | None) -> str:
    return "" if ratio is None or ratio == 1 else f" ({_format_change(ratio)})"


def _format_change(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.0%}"


def _format(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
