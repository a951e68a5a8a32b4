"""Tables of ``flashmoa bench moa``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa_bench.family import SIZES
from flashmoa_bench.moa.prompt_tokens import PromptTokens, layers
from flashmoa_bench.moa.scores import ALL, WayFigures, verdict
from flashmoa_bench.moa.ways import PAPER, PAPER_FIRST, WAYS


def show(rows: Sequence[WayFigures], console: Console) -> None:
    """Print every table, and what the ways are."""
    console.print(_ways(rows))
    for row in rows:
        if WAYS[row.way]:
            console.print(f"  {row.way}: {WAYS[row.way]}", highlight=False)
    console.print(
        "  seconds: of one question, median; in brackets over all-to-all, question by question."
        "\n  first token: of the answer; in brackets over one layer. tokens/s: that the last agent "
        "wrote, over\n  all seconds, with what a staircase drops. paper: at most, of Faster-MoA "
        "§5.3 and of the\n  abstract of Staircase Streaming. accuracy: mean score, with one "
        "standard error.",
        highlight=False,
    )
    if said := verdict(rows):
        console.print(f"  {said}", highlight=False)
    console.print(_prefills(rows))
    console.print(
        "  streamed: computed by prompt streams before the request came; cached: by others; late: "
        "after it came.\n  ?: the engine does not say (--enable-cache-report).\n",
        highlight=False,
    )
    if exits := [row for row in rows if row.deciding_on_path is not None]:
        console.print(_exits(exits))
        console.print(
            "  deciding: share of a question's time that went by on its critical path between an "
            "answer being\n  there and the decision, whatever that waited for; one decision: its "
            "seconds, on the path or not.\n",
            highlight=False,
        )
    for row in rows:
        if row.failed:
            console.print(f"{row.way}: {row.failed} questions without an answer")


def _groups(rows: Sequence[WayFigures]) -> list[str]:
    names = dict.fromkeys(group for row in rows for group in row.seconds)
    return [name for name in names if name != ALL]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _ways(rows: Sequence[WayFigures]) -> Table:
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


def _prefills(rows: Sequence[WayFigures]) -> Table:
    table = _table(
        "Agents' prompts by layer, tokens per question",
        *("", "layer", "agents", "prompt", "streamed", "cached", "late"),
    )
    for row in rows:
        for layer, agents in layers(row.prompts).items():
            whole = PromptTokens.total(agents)
            figures = (whole.prompt, whole.streamed, whole.cached, whole.late)
            named = row.way if layer == 1 else ""
            table.add_row(named, f"{layer}", f"{len(agents)}", *map(_tokens, figures))
    return table


def _tokens(count: float | None) -> str:
    return "?" if count is None else f"{count:.0f}"


def _exits(rows: Sequence[WayFigures]) -> Table:
    groups = _groups(rows)
    table = _table(
        "Early exit: proposers whose answers were waited for, by their model's size",
        *("", "size", *groups, ALL, "deciding", "one decision"),
    )
    for row in rows:
        for size in SIZES:
            shares = row.used.get(size, {})
            cells = (f"{shares[g]:.0%}" if g in shares else "" for g in (*groups, ALL))
            took = ("", "")
            if size == SIZES[0]:
                one = f"{1000 * row.decision:.0f} ms" if row.decision is not None else ""
                took = (f"{row.deciding_on_path:.1%}", one)
            table.add_row(row.way if size == SIZES[0] else "", size, *cells, *took)
    return table


def _bracketed(ratio: float | None) -> str:
    return "" if ratio is None or ratio == 1 else f" ({_change(ratio)})"


def _change(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.0%}"
