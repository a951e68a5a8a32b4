"""Show what links gained in a run, in Python and in a terminal (:class:`Report`)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import (
    CallFinished,
    Event,
    LinkClosed,
    Listener,
    PromptSent,
    ignore,
)
from flashmoa.observe.summary import (
    COLUMNS,
    Note,
    Summary,
    notes,
    overlaps,
    row,
    seconds,
    summary,
)
from flashmoa.observe.timeline import draw, lanes

_MOST_EVENTS = 4096
_MOST_NOTES = 10
_FAILURES = ("failed", "upstream failed")
_WIDTH = 100


class Report(JupyterMixin):
    """Tells what links gained: print it, or show it in a notebook, at any time.

    It is a listener. It keeps the last few thousand events, without prompts and answers.

    Args:
        listener: receives all events, too.
    """

    def __init__(self, listener: Listener = ignore) -> None:
        self._listener = listener
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished):
            self._events.append(replace(event, text=""))
        elif not isinstance(event, PromptSent):
            self._events.append(event)
        self._listener(event)

    @property
    def events(self) -> list[Event]:
        """The last few thousand events."""
        return list(self._events)

    @property
    def calls(self) -> list[Call]:
        """The calls, in the order in which they started."""
        return calls(self.events)

    @property
    def summary(self) -> Summary:
        return summary(self.calls)

    @property
    def notes(self) -> list[Note]:
        """What failed or ran unlinked, and why, in the order of time."""
        return notes(self.events)

    @contextmanager
    def live(self, console: Console | None = None) -> Generator[None]:
        """Draw the timeline in a terminal or a notebook, again and again, while this is entered."""
        console = console or Console(highlight=False)

        def draw_now() -> Text:
            return Text(draw(lanes(self.events, time.time()), console.width), no_wrap=True)

        with Live(get_renderable=draw_now, console=console, refresh_per_second=8) as display:
            yield
            display.refresh()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=_WIDTH, highlight=False)
        with console.capture() as shown:
            console.print(self)
        return shown.get().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from show_calls(self.events)


class Reported(JupyterMixin):
    """Is shown as its report, printed or in a notebook.

    Attributes:
        report: tells what the links have gained.
    """

    report: Report

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.report.summary}>"

    def __str__(self) -> str:
        return str(self.report)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.report


def show_calls(events: Sequence[Event]) -> RenderResult:
    """Yield what a terminal shows of a run: its calls, what links gained, and what went wrong."""
    found = calls(events)
    if any(call.finished is not None for call in found):
        yield _make_table(found)
        closed = Counter(event.reason for event in events if isinstance(event, LinkClosed))
        links = ", ".join(f"{count} {reason}" for reason, count in closed.most_common())
        yield Text(f"links, by why they ended: {links or 'none'}")
        yield Text(str(summary(found)))
    else:
        yield Text("No call has finished.")
    if remarks := _describe_notes(events):
        yield Text(f"\nWhat failed, or did not go as planned\n{remarks}")


def _make_table(found: Sequence[Call]) -> Table:
    table = Table(title="Calls; tokens", title_justify="left", box=box.SIMPLE_HEAD)
    # Without wider padding, nine columns fit into a terminal that is eighty characters wide.
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("agent", "link") else "right")
    ahead = overlaps(found)
    for call in found:
        table.add_row(*map(escape, row(call, ahead.get(call.started.call_id))))
    return table


def _describe_notes(events: Sequence[Event]) -> str:
    """Return the first notes of a run as lines; of many, those of failures."""
    begin = min((event.at for event in events), default=0.0)
    found = sorted(notes(events), key=lambda note: note.kind not in _FAILURES)
    shown = sorted(found[:_MOST_NOTES], key=lambda note: note.at)
    lines = [f"  {seconds(note.at - begin)}, {note.agent}: {note.text}" for note in shown]
    if len(found) > len(shown):
        lines.append(f"  ... and {len(found) - len(shown)} more; a trace's page shows all")
    return "\n".join(lines)
