"""``flashmoa trace FILE``: show what happened in a run, and when."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashmoa.observe import CallFinished, Event, LinkClosed
from flashmoa.observe.calls import calls
from flashmoa.observe.page import page
from flashmoa.observe.prefix_breaks import NO_BREAK, find_breaks, group_breaks
from flashmoa.observe.summary import COLUMNS, notes, overlaps, row, seconds, summary
from flashmoa.observe.timeline import draw, lanes
from flashmoa.observe.trace import TraceError, read

_MOST_BREAKS = 10
_MOST_NOTES = 10
_FAILURES = ("failed", "upstream failed")


def main(arguments: Sequence[str]) -> int:
    """Show a trace. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="flashmoa trace", description="Show what happened in a run, and when."
    )
    parser.add_argument("file", type=Path, help="a file that link(team, trace=FILE) wrote")
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write the trace as a page for browsers"
    )
    options = parser.parse_args(arguments)
    if options.html is not None and options.file.resolve() == options.html.resolve():
        parser.error(f"{options.file} is the trace itself; give another file to write")
    try:
        events = read(options.file)
        if options.html is not None:
            options.html.write_text(page(events, options.file.name), encoding="utf-8")
    except (OSError, TraceError) as error:
        print(f"flashmoa trace: {error}", file=sys.stderr)
        return 1
    show(events, Console(highlight=False))
    if options.html is not None:
        print(f"For a browser: {options.html}")
    return 0


def show(events: Sequence[Event], console: Console) -> None:
    """Print the timeline, the calls, what was prefilled ahead, what went wrong, and where prefixes
    broke."""
    if not any(isinstance(event, CallFinished) for event in events):
        console.print("No call in this trace has finished.")
        console.print(_describe_notes(events), markup=False, soft_wrap=True, end="")
        return
    console.out(draw(lanes(events), columns=min(console.width, 120)))
    console.print(_make_call_table(events))
    closed = Counter(event.reason for event in events if isinstance(event, LinkClosed))
    links = ", ".join(f"{count} {reason}" for reason, count in closed.most_common())
    console.print(f"links, by why they ended: {links or 'none'}", markup=False)
    console.print(str(summary(calls(events))), markup=False)
    console.print(_describe_notes(events), markup=False, soft_wrap=True, end="")
    console.print(f"\n{_describe_breaks(events)}", markup=False, soft_wrap=True)


def _describe_notes(events: Sequence[Event]) -> str:
    """Return the first notes of a run as lines; of many, those of failures."""
    begin = min((event.at for event in events), default=0.0)
    found = sorted(notes(events), key=lambda note: note.kind not in _FAILURES)
    shown = sorted(found[:_MOST_NOTES], key=lambda note: note.at)
    lines = [f"  {seconds(note.at - begin)}, {note.agent}: {note.text}\n" for note in shown]
    if len(found) > len(shown):
        lines.append(f"  ... and {len(found) - len(shown)} more; --html shows all\n")
    return "".join(["\nWhat failed, or did not go as planned\n", *lines]) if lines else ""


def _describe_breaks(events: Sequence[Event]) -> str:
    all_calls = calls(events)
    if not any(call.prompt is not None for call in all_calls):
        return (
            "Prefixes: not known, as the trace has no prompts; link(team, trace=FILE, "
            "trace_prompts=True) records them, and so does run() of flashmoa.openai"
        )
    groups = group_breaks(find_breaks(all_calls))
    if not groups:
        return f"Prefixes: {NO_BREAK}"
    shown = [group.describe() for group in groups[:_MOST_BREAKS]]
    if len(groups) > len(shown):
        shown.append(f"... and {len(groups) - len(shown)} more")
    return "\n\n".join(("Prefixes that broke, the costliest first", *shown))


def _make_call_table(events: Sequence[Event]) -> Table:
    table = Table(title="Calls; tokens", title_justify="left", box=box.SIMPLE_HEAD)
    # Without wider padding, nine columns fit into a terminal that is eighty characters wide.
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("agent", "link") else "right")
    all_calls = calls(events)
    ahead = overlaps(all_calls)
    for call in all_calls:
        table.add_row(*map(escape, row(call, ahead.get(call.started.call_id))))
    return table
