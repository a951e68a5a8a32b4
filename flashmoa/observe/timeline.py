"""Show a run as bars, a lane for each agent on an engine: in a terminal (``draw``) or Perfetto
(``perfetto``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.cells import cell_len, set_cell_size

from flashmoa.observe.calls import calls
from flashmoa.observe.events import Event, LinkAdvanced, LinkClosed, LinkOpened, UpstreamFailed

BarKind = Literal["ahead", "waiting", "decode"]

# Later kinds are drawn over earlier ones.
_MARKS: dict[BarKind, str] = {"ahead": "░", "waiting": "·", "decode": "█"}
_PERFETTO_NAMES: dict[BarKind, str] = {
    "ahead": "prefill ahead",
    "waiting": "waiting for the first token",
    "decode": "decode",
}
LEGEND = "░ prefilled ahead   · request sent, no token yet   █ decode"


@dataclass(frozen=True, slots=True)
class Bar:
    """From ``start`` to ``end``, in Unix seconds, ``tokens`` were computed or written."""

    kind: BarKind
    start: float
    end: float
    tokens: int | None = None


@dataclass(slots=True)
class Lane:
    """Holds the bars of one agent on one engine."""

    agent: str
    engine: str
    bars: list[Bar] = field(default_factory=list[Bar])


def lanes(events: Sequence[Event]) -> list[Lane]:
    """Return a lane for each agent on an engine, in the order of their first calls."""
    by_key: dict[tuple[str, str], Lane] = {}
    for call in calls(events):
        key = (call.agent, call.started.engine)
        lane = by_key.setdefault(key, Lane(*key))
        if call.finished is None:
            continue
        end, usage = call.finished.at, call.usage
        token = call.first_token or end
        if usage is not None and usage.prompt_stream is not None:
            spans = usage.prompt_stream.prefills
            lane.bars += [Bar("ahead", span.start, span.end, span.tokens) for span in spans]
        late, written = (usage.late_tokens, usage.completion_tokens) if usage else (None, None)
        lane.bars.append(Bar("waiting", call.started.at, token, late))
        lane.bars.append(Bar("decode", token, end, written))
    return list(by_key.values())


def draw(run: Sequence[Lane], columns: int = 80) -> str:
    """Draw lanes as text, ``columns`` characters wide; long names are shortened."""
    bars = [bar for lane in run for bar in lane.bars]
    if not bars:
        return "(nothing happened)"
    begin, end = min(bar.start for bar in bars), max(bar.end for bar in bars)
    names = [_shorten(lane.agent, columns // 3) for lane in run]
    name = max(map(cell_len, names))
    width = max(20, columns - name - 3)
    scale = width / max(end - begin, 1e-9)
    rows: list[str] = []
    for lane, label in zip(run, names, strict=True):
        row = [" "] * width
        for kind, mark in _MARKS.items():
            for bar in lane.bars:
                if bar.kind == kind:
                    left = int((bar.start - begin) * scale)
                    right = max(left + 1, round((bar.end - begin) * scale))
                    row[left:right] = mark * (min(right, width) - left)
        rows.append(f"{' ' * (name - cell_len(label))}{label} |{''.join(row)}|")
    axis = f"{'':>{name}}  0{f'{end - begin:.2f} s':>{width - 1}}"
    return "\n".join([*rows, axis, f"{'':>{name}}  {LEGEND}"])


def _shorten(name: str, width: int) -> str:
    if cell_len(name) <= width:
        return name
    return f"{set_cell_size(name, width - 1).rstrip()}…"


def perfetto(events: Sequence[Event]) -> dict[str, Any]:
    """Return a run in the format that ui.perfetto.dev and Chrome's tracing open.

    Engines are processes, agents are threads; times in microseconds since the first event. Prefills
    ahead of an agent's calls are another thread, and so are calls at the same time: complete events
    of one thread must be nested, and these overlap.

    Source: the Trace Event Format (complete, instant, counter and metadata events).
    """
    run = lanes(events)
    begin = min((event.at for event in events), default=0.0)
    begin = min([begin, *(bar.start for lane in run for bar in lane.bars)])
    engines = {url: number for number, url in enumerate(dict.fromkeys(x.engine for x in run), 1)}
    numbers = itertools.count(1)
    # Where a lane's links are shown. The events of some links name no engine.
    places: dict[tuple[str, str], dict[str, int]] = {}
    entries: list[dict[str, Any]] = [
        _name_entry("process_name", pid=number, tid=0, name=url) for url, number in engines.items()
    ]
    for lane in run:
        for name, bars in _threads(lane):
            place = {"pid": engines[lane.engine], "tid": next(numbers)}
            places.setdefault((lane.agent, lane.engine), place)
            places.setdefault((lane.agent, ""), place)
            entries.append(_name_entry("thread_name", **place, name=name))
            entries += [_bar_entry(bar, begin, place) for bar in bars]
    for event in events:
        place = places.get((event.agent, event.engine)) or places.get((event.agent, ""))
        if place is not None:
            entries += _link_entries(event, _microseconds(event.at, begin), place)
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _threads(lane: Lane) -> list[tuple[str, list[Bar]]]:
    """Return the names and the bars of a lane's threads; the first one is there without bars."""
    called = _without_overlaps([bar for bar in lane.bars if bar.kind != "ahead"]) or [[]]
    ahead = _without_overlaps([bar for bar in lane.bars if bar.kind == "ahead"])
    threads = [(lane.agent, bars) for bars in called]
    return threads + [(f"{lane.agent}, {_PERFETTO_NAMES['ahead']}", bars) for bars in ahead]


def _without_overlaps(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Share bars among rows in which they do not overlap; a call's two bars stay together."""
    rows: list[list[Bar]] = []
    for bar in bars:
        free = [row for row in rows if row[-1].end <= bar.start]
        if free:
            # Where a call has waited, its decode follows without a gap.
            max(free, key=lambda row: row[-1].end).append(bar)
        else:
            rows.append([bar])
    return rows


def _name_entry(kind: str, *, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _bar_entry(bar: Bar, begin: float, place: dict[str, int]) -> dict[str, Any]:
    # Rounded by itself, a duration would make bars overlap.
    start, end = _microseconds(bar.start, begin), _microseconds(bar.end, begin)
    return {
        "ph": "X",
        "name": _PERFETTO_NAMES[bar.kind],
        "cat": bar.kind,
        "ts": start,
        "dur": end - start,
        "args": {} if bar.tokens is None else {"tokens": bar.tokens},
        **place,
    }


def _microseconds(at: float, begin: float) -> int:
    return round((at - begin) * 1e6)


def _link_entries(event: Event, at: int, place: dict[str, int]) -> list[dict[str, Any]]:
    if isinstance(event, LinkAdvanced):
        tokens = {"certain": event.received_tokens, "prefilled": event.prefilled_tokens}
        name = f"prompt of {event.agent}, tokens"
        return [{"ph": "C", "name": name, "ts": at, "pid": place["pid"], "args": tokens}]
    if isinstance(event, LinkOpened):
        name = f"link opened, from {', '.join(event.upstream) or 'no agent'}"
    elif isinstance(event, LinkClosed):
        name = f"link closed: {event.reason}"
    elif isinstance(event, UpstreamFailed):
        name = f"{event.upstream} failed ({event.failure}); action: {event.action}"
    else:
        return []
    return [{"ph": "i", "s": "t", "name": name, "ts": at, **place}]
