"""``flashmoa trace FILE``: show what happened in a run, and when."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flashmoa.observe import CallFinished, Event
from flashmoa.observe.calls import calls
from flashmoa.observe.page import page
from flashmoa.observe.prefix_breaks import NO_BREAK, find_breaks, group_breaks
from flashmoa.observe.report import show_calls
from flashmoa.observe.timeline import draw, lanes
from flashmoa.observe.trace import TraceError, read


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
    """Print the timeline, the calls, their prefills, problems, and broken prefixes."""
    has_calls = any(isinstance(event, CallFinished) for event in events)
    if has_calls:
        console.out(draw(lanes(events), console.width))
    for part in show_calls(events):
        console.print(part, soft_wrap=isinstance(part, Text))
    if has_calls:
        console.print(f"\n{_describe_breaks(events)}", markup=False, soft_wrap=True)


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
    shown = [group.describe() for group in groups[:10]]
    if len(groups) > len(shown):
        shown.append(f"... and {len(groups) - len(shown)} more")
    return "\n\n".join(("Prefixes that broke, the costliest first", *shown))
