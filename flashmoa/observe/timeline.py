"""A run as lanes of bars, one lane per agent, drawn in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flashmoa.observe.calls import calls
from flashmoa.observe.events import Event

Kind = Literal["ahead", "waiting", "decode"]

# Later kinds are drawn over earlier ones.
_MARKS: dict[Kind, str] = {"ahead": "░", "waiting": "·", "decode": "█"}
LEGEND = "░ prefilled ahead   · request sent, no token yet   █ decode"


@dataclass(frozen=True, slots=True)
class Bar:
    """``start`` and ``end`` in Unix seconds; ``tokens`` that were computed or written."""

    kind: Kind
    start: float
    end: float
    tokens: int | None = None


@dataclass(slots=True)
class Lane:
    """One agent's bars."""

    agent: str
    engine: str
    bars: list[Bar] = field(default_factory=list[Bar])


def lanes(events: Sequence[Event]) -> list[Lane]:
    """One lane per agent, in the order of their first calls."""
    found: dict[str, Lane] = {}
    for call in calls(events):
        lane = found.setdefault(call.agent, Lane(call.agent, call.started.engine))
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
    return list(found.values())


def draw(run: Sequence[Lane], columns: int = 80) -> str:
    """Lanes as text, ``columns`` characters wide."""
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
