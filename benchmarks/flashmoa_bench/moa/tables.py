"""Print the tables of ``flashmoa bench moa``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashmoa_bench.family import SIZES
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.moa.prompt_tokens import PromptTokens, group_by_layer
from flashmoa_bench.moa.scores import ALL, Gain, WayFigures, verdict
from flashmoa_bench.moa.ways import PAPER, PAPER_FIRST, WAYS


def show(rows: Sequence[WayFigures], console: Console) -> None:
    """Print all tables, and explain the ways and the columns."""
    console.print(_latency_table(rows))
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
    if sentence := verdict(rows):
        console.print(f"  {sentence}", highlight=False)
    console.print(_prompt_table(rows))
    console.print(
        "  streamed: computed by prompt streams before the request came; cached: by others; late: "
        "after it came.\n  ?: the engine does not say (--enable-cache-report).\n",
        highlight=False,
    )
    if exits := [row for row in rows if row.deciding_on_path is not None]:
        console.print(_exit_table(exits))
        console.print(
            "  deciding: share of a question's time that went by on its critical path between an "
            "answer being\n  there and the decision, whatever that waited for; one decision: its "
            "seconds, on the path or not.\n",
            highlight=False,
        )
    for row in rows:
        if row.failed:
            console.print(f"{row.way}: {row.failed} questions without an answer")


def show_gains(gains: Sequence[Gain], alone: str, console: Console) -> None:
    """Say how much better each way is than a model alone, question by question."""
    for gain in gains:
        certainty = "more than" if gain.is_certain else "not more than"
        console.print(
            f"{gain.way}: {100 * gain.difference:+.1f} points over {alone} alone, standard error "
            f"{100 * gain.error:.1f}: {certainty} two standard errors",
            highlight=False,
        )


def _groups(rows: Sequence[WayFigures]) -> list[str]:
    names = dict.fromkeys(group for row in rows for group in row.seconds)
    return [name for name in names if name != ALL]


def _latency_table(rows: Sequence[WayFigures]) -> Table:
    groups = _groups(rows) if any(row.accuracy for row in rows) else []
    # Many groups would not fit; the JSON has all of them.
    columns = groups if 1 < len(groups) <= 5 else []
    table = make_table(
        "Latency and accuracy",
        *("", "seconds", "paper", "first token", "paper", "tokens/s"),
        *columns,
        "accuracy",
        box=SIMPLE_HEAD,
    )
    for row in rows:
        table.add_row(
            row.way,
            f"{row.seconds.get(ALL, 0):.2f}{_format_ratio(row.relative.get(ALL))}",
            _format_change(PAPER.get(row.way)),
            f"{row.first_token:.2f}{_format_ratio(row.relative_first)}",
            _format_change(PAPER_FIRST.get(row.way)),
            f"{row.tokens_per_second:.0f}",
            *(f"{row.accuracy[group]:.0%}" for group in columns),
            f"{row.accuracy[ALL]:.1%} ± {row.error:.1%}" if row.accuracy else "",
        )
    return table


def _prompt_table(rows: Sequence[WayFigures]) -> Table:
    table = make_table(
        "Agents' prompts by layer, tokens per question",
        *("", "layer", "agents", "prompt", "streamed", "cached", "late"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        for layer, agents in group_by_layer(row.prompts).items():
            total = PromptTokens.total(agents)
            counts = (total.prompt, total.streamed, total.cached, total.late)
            way = row.way if layer == 1 else ""
            table.add_row(way, f"{layer}", f"{len(agents)}", *map(_format_count, counts))
    return table


def _format_count(count: float | None) -> str:
    return "?" if count is None else f"{count:.0f}"


def _exit_table(rows: Sequence[WayFigures]) -> Table:
    groups = _groups(rows)
    table = make_table(
        "Early exit: proposers whose answers were waited for, by their model's size",
        *("", "size", *groups, ALL, "deciding", "one decision"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        for size in SIZES:
            shares = row.used.get(size, {})
            cells = (f"{shares[g]:.0%}" if g in shares else "" for g in (*groups, ALL))
            times = ("", "")
            if size == SIZES[0]:
                decision = f"{1000 * row.decision:.0f} ms" if row.decision is not None else ""
                times = (f"{row.deciding_on_path:.1%}", decision)
            table.add_row(row.way if size == SIZES[0] else "", size, *cells, *times)
    return table


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None or ratio == 1 else f" ({_format_change(ratio)})"


def _format_change(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.0%}"
