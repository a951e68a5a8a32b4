"""``flashmoa trace FILE``: what happened in a run, and when."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flashmoa.observe import CallFinished, CallStarted, Event, FirstToken, LinkClosed
from flashmoa.observe.perfetto import perfetto
from flashmoa.observe.timeline import draw, lanes
from flashmoa.observe.trace import TraceError, read


def main(arguments: Sequence[str]) -> int:
    """Show a trace; returns the exit status."""
    parser = argparse.ArgumentParser(prog="flashmoa trace", description=__doc__)
    parser.add_argument("file", type=Path, help="what link(team, trace=FILE) has written")
    parser.add_argument("--perfetto", type=Path, metavar="FILE.json", help="for ui.perfetto.dev")
    options = parser.parse_args(arguments)
    try:
        events = read(options.file)
        if options.perfetto is not None:
            options.perfetto.write_text(json.dumps(perfetto(events)) + "\n")
    except (OSError, TraceError) as error:
        print(f"flashmoa trace: {error}", file=sys.stderr)
        return 1
    show(events, Console(highlight=False))
    if options.perfetto is not None:
        print(f"For ui.perfetto.dev: {options.perfetto}")
    return 0


def show(events: Sequence[Event], console: Console) -> None:
    """Print the timeline and a table of the calls."""
    if not any(isinstance(event, CallFinished) for event in events):
        console.print("No call was finished in this trace.")
        return
    console.print(draw(lanes(events), columns=min(console.width, 120)), markup=False)
    console.print(_calls(events))
    closed = Counter(event.reason for event in events if isinstance(event, LinkClosed))
    links = ", ".join(f"{count} {reason}" for reason, count in closed.most_common())
    console.print(f"links, by why they ended: {links or 'there were none'}", markup=False)


def _calls(events: Sequence[Event]) -> Table:
    names = ("agent", "prompt", "cached", "streamed", "late", "written", "first token", "link")
    table = Table(*names, title="Calls; tokens", title_justify="left")
    started: dict[str, CallStarted] = {}
    first: dict[str, float] = {}
    for event in events:
        if isinstance(event, CallStarted):
            started[event.agent] = event
            first.pop(event.agent, None)
        elif isinstance(event, FirstToken):
            first[event.agent] = event.at
        elif isinstance(event, CallFinished) and event.agent in started:
            table.add_row(*_row(event, started[event.agent], first.get(event.agent)))
    return table


def _row(event: CallFinished, started: CallStarted, first: float | None) -> list[str]:
    waited = f"{(first - started.at) * 1000:.0f} ms" if first is not None else ""
    link = "late" if started.late else ""
    usage = event.usage
    if usage is None:
        return [event.agent, *[""] * 5, waited, link]
    if usage.prompt_stream is not None:
        link = usage.prompt_stream.status
    numbers = (
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.streamed_tokens,
        usage.late_tokens,
        usage.completion_tokens,
    )
    return [event.agent, *("" if n is None else str(n) for n in numbers), waited, link]
