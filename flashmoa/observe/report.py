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

from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import (
    CallFinished,
    Event,
    Listener,
    PromptSent,
    ignore,
)
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

_MOST_EVENTS = 4096
_MOST_NOTES = 10
_MOST_NAMES = 4
_WIDTH = 100
_LEGEND = """\
prompt: cached tokens and late ones, computed after the request; streamed: cached by its link
ahead: time of its link's prefills before the request; an empty cell: the engine does not say
link: """


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
    def links(self) -> dict[str, int]:
        """How many links have ended for each reason, and how many are ``still open``."""
        return count_links(self.events)

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
    # How links have ended is counted above.
    if reasons := [note for note in remarks if note.kind not in (*FAILURES, "ended")]:
        yield Text(f"\nNot prefilled ahead, and why\n{_describe_reasons(reasons)}")
    if failures := [note for note in remarks if note.kind in FAILURES]:
        begin = min(event.at for event in events)
        lines = [f"{seconds(note.at - begin)}, {note.agent}: {note.text}" for note in failures]
        yield Text(f"\nWhat failed\n{_first_lines(lines)}")


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
    """Return a line for each text, with the agents that it is said of and how often."""
    agents: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for note in reasons:
        agents[note.text][note.agent] += 1
    lines: list[str] = []
    for text, said_of in agents.items():
        names = [f"{name} ({count})" if count > 1 else name for name, count in said_of.items()]
        if len(names) > _MOST_NAMES:
            names[_MOST_NAMES:] = [f"{len(names) - _MOST_NAMES} more"]
        lines.append(f"{', '.join(names)}: {text}")
    return _first_lines(lines)


def _first_lines(lines: Sequence[str]) -> str:
    shown = [f"  {line}" for line in lines[:_MOST_NOTES]]
    if len(lines) > len(shown):
        shown.append(f"  ... and {len(lines) - len(shown)} more; a trace's page shows all")
    return "\n".join(shown)
