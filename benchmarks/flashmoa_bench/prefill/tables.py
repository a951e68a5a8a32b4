"""Passes of prefill-only requests as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from flashmoa_bench.harness.rounds import percentile
from flashmoa_bench.prefill.passes import Agreement, Answer, Pass, agreement


@dataclass(frozen=True, slots=True)
class Row:
    """One way; medians over rounds.

    Attributes:
        seconds: until everything was answered. rounds: of each round.
        computed: prompt tokens that were computed. duplicates: these over the unique ones.
        p50, p99: seconds of a request, over all rounds.
        gain: the throughput over that of the reference.
    """

    way: str
    seconds: float
    rounds: list[float]
    tokens_per_second: float
    requests_per_second: float
    computed: float
    duplicates: float
    p50: float
    p99: float
    gain: float
    agreement: Agreement


def summarise(
    passes: Mapping[str, Sequence[Pass]],
    reference: str,
    expected: Mapping[str, Answer],
    unique: int,
) -> list[Row]:
    """``reference``: the way that gains are over. ``unique``: tokens of all prompts."""
    base = seconds_of(passes[reference])
    rows: list[Row] = []
    for way, each in passes.items():
        seconds, computed = seconds_of(each), median(one.computed_tokens for one in each)
        waited = [answer.seconds for one in each for answer in one.answers.values()]
        rows.append(
            Row(
                way=way,
                seconds=seconds,
                rounds=[one.seconds for one in each],
                tokens_per_second=each[0].prompt_tokens / seconds,
                requests_per_second=len(each[0].answers) / seconds,
                computed=computed,
                duplicates=computed / unique,
                p50=percentile(waited, 0.5),
                p99=percentile(waited, 0.99),
                gain=base / seconds,
                agreement=agreement(expected, each),
            )
        )
    return rows


def seconds_of(passes: Sequence[Pass]) -> float:
    """The median of their lengths."""
    return median(one.seconds for one in passes)


def show(title: str, rows: Sequence[Row], goals: Mapping[str, float], console: Console) -> None:
    """Print one table; nothing where there are no rows. ``goals``: gains, by way."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    columns = ("seconds", "tokens/s", "requests/s", "computed", "of unique", "p50", "p99")
    table.add_column("")
    for name in (*columns, "gain", "goal", "same", "logprobs"):
        table.add_column(name, justify="right")
    for row in rows:
        same = row.agreement
        table.add_row(
            row.way,
            f"{row.seconds:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.requests_per_second:.1f}",
            f"{row.computed:,.0f}",
            f"{row.duplicates:.2f}",
            f"{row.p50:.2f}",
            f"{row.p99:.2f}",
            f"{row.gain:.2f}",
            f"{goals[row.way]:.2f}" if row.way in goals else "",
            f"{same.same:,} of {same.answers:,}",
            "" if same.logprob is None else f"{same.logprob:.0e}",
        )
    console.print(table)
