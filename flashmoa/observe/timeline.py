"""Show a run as bars, one lane per agent: in a terminal (``draw``) or Perfetto (``perfetto``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """Holds one agent's bars."""

    agent: str
    engine: str
    bars: list[Bar] = field(default_factory=list[Bar])


def lanes(events: Sequence[Event]) -> list[Lane]:
    """Return one lane per agent, in the order of their first calls."""
    by_agent: dict[str, Lane] = {}
    for call in calls(events):
        lane = by_agent.setdefault(call.agent, Lane(call.agent, call.started.engine))
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
    return list(by_agent.values())


def draw(run: Sequence[Lane], columns: int = 80) -> str:
    """Draw lanes as text, ``columns`` characters wide."""
    bars = [bar for lane in run for bar in lane.bars]
    if not bars:
        return "(nothing happened)"
    begin, end = min(bar.start for bar in bars), max(bar.end for bar in bars)
    name = max(len(lane.agent) for lane in run)
    width = max(20, columns - name - 3)
    scale = width / max(end - begin, 1e-9)
    rows: list[str] = []
    for lane in run:
        row = [" "] * width
        for kind, mark in _MARKS.items():
            for bar in lane.bars:
                if bar.kind == kind:
                    left = int((bar.start - begin) * scale)
                    right = max(left + 1, round((bar.end - begin) * scale))
                    row[left:right] = mark * (min(right, width) - left)
        rows.append(f"{lane.agent:>{name}} |{''.join(row)}|")
    axis = f"{'':>{name}}  0{f'{end - begin:.2f} s':>{width - 1}}"
    return "\n".join([*rows, axis, f"{'':>{name}}  {LEGEND}"])


def perfetto(events: Sequence[Event]) -> dict[str, Any]:
    """Return a run in the format that ui.perfetto.dev and Chrome's tracing open.

    Engines are processes, agents are threads; times in microseconds since the first event.

    Source: the Trace Event Format (complete, instant, counter and metadata events).
    """
    run = lanes(events)
    begin = min((event.at for event in events), default=0.0)
    begin = min([begin, *(bar.start for lane in run for bar in lane.bars)])
    engines = {url: number for number, url in enumerate(dict.fromkeys(x.engine for x in run), 1)}
    places = {
        lane.agent: {"pid": engines[lane.engine], "tid": number}
        for number, lane in enumerate(run, 1)
    }
    entries: list[dict[str, Any]] = [
        _name_entry("process_name", pid=number, tid=0, name=url) for url, number in engines.items()
    ]
    for lane in run:
        place = places[lane.agent]
        entries.append(_name_entry("thread_name", **place, name=lane.agent))
        entries += [_bar_entry(bar, begin, place) for bar in lane.bars]
    for event in events:
        if event.agent in places:
            at = round((event.at - begin) * 1e6)
            entries += _link_entries(event, at, places[event.agent])
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _name_entry(kind: str, *, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _bar_entry(bar: Bar, begin: float, place: dict[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": _PERFETTO_NAMES[bar.kind],
        "cat": bar.kind,
        "ts": round((bar.start - begin) * 1e6),
        "dur": round((bar.end - bar.start) * 1e6),
        "args": {} if bar.tokens is None else {"tokens": bar.tokens},
        **place,
    }


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
