"""Tables of ``flashmoa bench moa``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa.bench.exam import ALL, Row
from flashmoa.bench.family.models import SIZES
from flashmoa.bench.mixtures import ABOUT, PAPER, PAPER_FIRST


def show(rows: Sequence[Row], console: Console) -> None:
    """Print every table, and what the ways are."""
    console.print(_ways(rows))
    for row in rows:
        if ABOUT[row.way]:
            console.print(f"  {row.way}: {ABOUT[row.way]}", highlight=False)
    console.print(
        "  seconds: of one question, median; in brackets over all-to-all, question by question."
        "\n  first token: of the answer; in brackets over one layer. paper: what Faster-MoA §5.3 "
        "has at most,\n  and Staircase Streaming's first token. accuracy: mean score, all with one "
        "standard error.\n",
        highlight=False,
    )
    console.print(_prefills(rows))
    exits = [row for row in rows if row.way == "full" and row.deciding is not None]
    if exits:
        console.print(_exits(exits))
    for row in rows:
        if row.failed:
            console.print(f"{row.way}: {row.failed} questions without an answer")


def _groups(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(group for row in rows for group in row.seconds)
    return [name for name in names if name != ALL]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _ways(rows: Sequence[Row]) -> Table:
    groups = _groups(rows) if any(row.accuracy for row in rows) else []
    # Of many subjects, the mean says enough; all are in the JSON.
    shown = groups if 1 < len(groups) <= 5 else []
    table = _table(
        "Latency and accuracy",
        *("", "seconds", "paper", "first token", "paper", "tokens/s"),
        *shown,
        "accuracy",
    )
    for row in rows:
        table.add_row(
            row.way,
            f"{row.seconds.get(ALL, 0):.2f}{_bracketed(row.relative.get(ALL))}",
            _change(PAPER.get(row.way)),
            f"{row.first_token:.2f}{_bracketed(row.relative_first)}",
            _change(PAPER_FIRST.get(row.way)),
            f"{row.tokens_per_second:.0f}",
            *(f"{row.accuracy[group]:.0%}" for group in shown),
            f"{row.accuracy[ALL]:.1%} ± {row.error:.1%}" if row.accuracy else "",
        )
    return table


def _prefills(rows: Sequence[Row]) -> Table:
    table = _table(
        "The last aggregator's prompts, tokens per question", "", "prompt", "prefilled", "late"
    )
    for row in rows:
        if row.prompt_tokens:
            figures = (row.prompt_tokens, row.computed, row.late)
            table.add_row(row.way, *(f"{figure:.0f}" for figure in figures))
    return table


def _exits(rows: Sequence[Row]) -> Table:
    groups = _groups(rows)
    table = _table(
        "Early exit: proposers whose answers were waited for, by their model's size",
        *("", "size", *groups, ALL, "deciding, share of its layers' time"),
    )
    for row in rows:
        for size in SIZES:
            shares = row.used.get(size, {})
            cells = (f"{shares[g]:.0%}" if g in shares else "" for g in (*groups, ALL))
            deciding = f"{row.deciding:.1%}" if size == SIZES[0] and row.deciding else ""
            table.add_row(row.way if size == SIZES[0] else "", size, *cells, deciding)
    return table


def _bracketed(ratio: float | None) -> str:
    return "" if ratio is None or ratio == 1 else f" ({_change(ratio)})"


def _change(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.0%}"
