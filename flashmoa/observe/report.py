"""Show what links gained in a run, in Python and in a terminal (:class:`Report`)."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
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

from flashmoa._limits import MAX_REMEMBERED
from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import CallFinished, Event, Listener, PromptSent, ignore
from flashmoa.observe.summary import (
    COLUMNS,
    FAILURES,
    LINK_WORDS,
    Note,
    Summary,
    count_links,
    link_status,
    notes,
    overlaps,
    row,
    seconds,
    summary,
)
from flashmoa.observe.timeline import draw, lanes

_LEGEND = """\
prompt: cached tokens and late ones, computed after the request; streamed: cached by its link
ahead: time of its link's prefills before the request; an empty cell: the engine does not say
link: """


class Report(JupyterMixin):
    """Tells what links gained: print it, or show it in a notebook, at any time.

    It is a listener that keeps the last 4,096 events, without prompts and answers.

    Args:
        listener: receives all events, too.
    """

    def __init__(self, listener: Listener = ignore) -> None:
        self._listener = listener
        self._events: deque[Event] = deque(maxlen=MAX_REMEMBERED)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished):
            self._events.append(replace(event, text=""))
        elif not isinstance(event, PromptSent):
            self._events.append(event)
        self._listener(event)

    @property
    def events(self) -> list[Event]:
        """The last 4,096 events, or fewer."""
        return list(self._events)

    @property
    def calls(self) -> list[Call]:
        """The calls, in starting order."""
        return calls(self.events)

    @property
    def summary(self) -> Summary:
        return summary(self.calls)

    @property
    def links(self) -> dict[str, int]:
        """The number of links by reason of their end; some may be ``still open``."""
        return count_links(self.events)

    @property
    def notes(self) -> list[Note]:
        """Remarks, oldest first: what failed or ran unlinked, and why."""
        return notes(self.events)

    @contextmanager
    def live(self, console: Console | None = None) -> Generator[None]:
        """Draw the timeline in a terminal or a notebook until the block ends."""
        console = console or Console(highlight=False)

        def draw_now() -> Text:
            return Text(draw(lanes(self.events, time.time()), console.width), no_wrap=True)

        with Live(get_renderable=draw_now, console=console, refresh_per_second=8) as display:
            yield
            display.refresh()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=100, highlight=False)
        with console.capture() as shown:
            console.print(self)
        return shown.get().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from show_calls(self.events)


class Reported(JupyterMixin):
    """An object that prints, also in a notebook, as its report.

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
    """Yield the report of a run for a terminal: its calls, what links gained, and why not more."""
    found = calls(events)
    if any(call.finished is not None for call in found):
        yield _make_table(found)
        yield Text(_describe_columns(found))
        links = ", ".join(f"{count} {reason}" for reason, count in count_links(events).items())
        yield Text(f"links, by why they ended: {links or 'none'}")
        yield Text(str(summary(found)))
    else:
        yield Text("No call has finished.")
    remarks = notes(events)
    # The counts above include the ends of links.
    if reasons := [note for note in remarks if note.kind not in (*FAILURES, "ended")]:
        yield Text(f"\nNot prefilled ahead, and why\n{_describe_reasons(reasons)}")
    if failures := [note for note in remarks if note.kind in FAILURES]:
        begin = min(event.at for event in events)
        lines = [f"{seconds(note.at - begin)}, {note.agent}: {note.text}" for note in failures]
        yield Text(f"\nWhat failed\n{_indent(lines)}")


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


def _describe_columns(found: Sequence[Call]) -> str:
    statuses = {link_status(call) for call in found}
    words = [f"{word}: {text}" for word, text in LINK_WORDS.items() if word in statuses]
    return f"{_LEGEND}{'; '.join(words)}".removesuffix("\nlink: ")


def _describe_reasons(reasons: Sequence[Note]) -> str:
    """Return a line for each text, with its agents and how often each has it."""
    agents: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for note in reasons:
        agents[note.text][note.agent] += 1
    lines: list[str] = []
    for text, counts in agents.items():
        names = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
        names = _shorten(names, 4, "{} more")
        lines.append(f"{', '.join(names)}: {text}")
    return _indent(lines)


def _indent(lines: Sequence[str]) -> str:
    shown = _shorten(lines, 10, "... and {} more; a trace's page shows all")
    return "\n".join(f"  {line}" for line in shown)


def _shorten(items: Sequence[str], most: int, rest: str) -> list[str]:
    """Return the first items, and ``rest`` with the number of the others, if there are others."""
    left_out = [rest.format(len(items) - most)] if len(items) > most else []
    return [*items[:most], *left_out]
