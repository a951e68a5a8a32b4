"""Draw a run in a terminal (``draw``): bars in a lane for each agent on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.cells import cell_len, set_cell_size

from flashmoa.observe.calls import calls
from flashmoa.observe.events import CallFailed, Event, LinkAdvanced, LinkOpened

BarKind = Literal["ahead", "waiting", "decode"]

# Later kinds are drawn over earlier kinds.
_MARKS: dict[BarKind, str] = {"ahead": "░", "waiting": "·", "decode": "█"}
LEGEND = "░ prefilled ahead   · request sent, no token yet   █ decode"


@dataclass(frozen=True, slots=True)
class Bar:
    """A time from ``start`` to ``end``, in Unix seconds."""

    kind: BarKind
    start: float
    end: float


@dataclass(slots=True)
class Lane:
    """The bars of an agent's calls to an engine."""

    agent: str
    engine: str
    bars: list[Bar] = field(default_factory=list[Bar])


def lanes(events: Sequence[Event], now: float | None = None) -> list[Lane]:
    """Return a lane for each agent on an engine, in the order of their first calls.

    Args:
        now: the end, in Unix seconds, of the bars of unfinished calls and links; ``None`` leaves
            them out.
    """
    by_key: dict[tuple[str, str], Lane] = {}
    unused = _find_links(events) if now is not None else {}
    for call in calls(events):
        key = (call.agent, call.started.engine)
        lane = by_key.setdefault(key, Lane(*key))
        end = call.finished.at if call.finished is not None else now
        if end is None or isinstance(call.ended, CallFailed):
            continue
        usage = call.usage
        if usage is not None and usage.prompt_stream is not None:
            unused.pop(usage.prompt_stream.id, None)
            spans = usage.prompt_stream.prefills
            lane.bars += [Bar("ahead", span.start, span.end) for span in spans]
        token = call.first_token or end
        lane.bars.append(Bar("waiting", call.started.at, token))
        lane.bars.append(Bar("decode", token, end))
    for opened, end in unused.values():
        key = (opened.agent, opened.engine)
        by_key.setdefault(key, Lane(*key)).bars.append(Bar("ahead", opened.at, end))
    return list(by_key.values())


def _find_links(events: Sequence[Event]) -> dict[str, tuple[LinkOpened, float]]:
    """Return links by stream id, each with the time of its last prefill."""
    found: dict[str, tuple[LinkOpened, float]] = {}
    for event in events:
        if isinstance(event, LinkOpened):
            found[event.stream_id] = event, event.at
        elif isinstance(event, LinkAdvanced) and event.stream_id in found:
            found[event.stream_id] = found[event.stream_id][0], event.at
    return found


def draw(run: Sequence[Lane], columns: int = 80) -> str:
    """Draw lanes as text, ``columns`` characters wide, 120 at most; long names are shortened."""
    columns = min(columns, 120)
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
