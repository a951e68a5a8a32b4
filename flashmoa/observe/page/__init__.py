"""Show a run as one HTML file that loads nothing and needs no network (``page``)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from flashmoa.observe.calls import Call, calls, handoffs
from flashmoa.observe.events import CallFailed, Event
from flashmoa.observe.summary import (
    COLUMNS,
    Note,
    count_links,
    link_status,
    notes,
    overlaps,
    row,
    summary,
)

_SCRIPTS = ("format.js", "card.js", "layout.js", "chart.js", "view.js", "page.js")


def page(events: Sequence[Event], title: str) -> str:
    """Return an HTML document of a run's events, headed by ``title``.

    Agents' names and texts may contain anything that users and models wrote. They are data in a
    script element, which they cannot close, and the script shows them as text. The page's policy
    allows only the page's own script (Content Security Policy Level 3, hashes).
    """
    script = "\n".join(['"use strict";', *(_read_part(name) for name in _SCRIPTS)])
    style = _read_part("page.css")
    return Template(_read_part("template.html")).substitute(
        title=escape(title),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        style=style,
        script=script,
        run=_escape_json(json.dumps(run_data(events), separators=(",", ":"))),
    )


def _read_part(name: str) -> str:
    return files("flashmoa.observe.page").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _escape_json(text: str) -> str:
    """Escape JSON for a script element: it cannot end the element or start a comment."""
    return text.replace("<", "\\u003c")


@dataclass(slots=True)
class _PageLane:
    """Places an agent's calls to an engine; calls that overlap get separate rows."""

    agent: str
    engine: str
    models: set[str] = field(default_factory=set[str])
    # The end of each row's last call, and the end of the last prefill ahead of its calls.
    rows: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def place(self, call: Call, end: float) -> int:
        """Return the row of a call that ends at ``end``. Place calls in starting order."""
        start = call.started.at
        spans = _spans(call) or [(start, start, 0)]
        first_prefill, prefilled = spans[0][0], spans[-1][1]
        for number, (last_end, last_prefill) in enumerate(self.rows):
            if last_end <= start and last_prefill <= first_prefill:
                self.rows[number] = (end, max(last_prefill, prefilled))
                return number
        self.rows.append((end, prefilled))
        return len(self.rows) - 1


def run_data(events: Sequence[Event]) -> dict[str, Any]:
    """Return the lanes, calls, notes and figures of a run as JSON values, for the page's script.

    Times are seconds since the first event. A call has the index of its lane. Its ``from`` lists
    the calls that it got text from: the index of each call, and the start and end of the handoff.
    A call without a known end ends at the last event.
    """
    run_calls, run_notes = calls(events), notes(events)
    begin, end = _bounds(events, run_calls)
    lanes = _make_lanes(run_calls, run_notes)
    return {
        "begin": begin,
        "seconds": _time(end, begin),
        "summary": asdict(summary(run_calls)),
        "links": count_links(events),
        "columns": COLUMNS,
        "calls": _calls_data(events, run_calls, lanes, (begin, end)),
        "notes": [_note_data(note, lanes, begin) for note in run_notes],
        "lanes": [_lane_data(lane) for lane in lanes.values()],
    }


def _bounds(events: Sequence[Event], run_calls: Sequence[Call]) -> tuple[float, float]:
    times = [event.at for event in events]
    times += [at for call in run_calls for span in _spans(call) for at in span[:2]]
    return min(times, default=0.0), max(times, default=0.0)


def _make_lanes(
    run_calls: Sequence[Call], run_notes: Sequence[Note]
) -> dict[tuple[str, str], _PageLane]:
    """Make a lane for each agent on an engine, by the agent's name and the engine's URL.

    Lanes with the same engine stand together, in the order of their first calls.
    """
    keys = [(call.agent, call.started.engine) for call in run_calls]
    engine_of = dict(keys)
    keys += [(note.agent, note.engine or engine_of.get(note.agent, "")) for note in run_notes]
    engines = list(dict.fromkeys(engine for _, engine in keys))
    ordered = sorted(dict.fromkeys(keys), key=lambda key: engines.index(key[1]))
    return {key: _PageLane(*key) for key in ordered}


def _calls_data(
    events: Sequence[Event],
    run_calls: Sequence[Call],
    lanes: dict[tuple[str, str], _PageLane],
    bounds: tuple[float, float],
) -> list[dict[str, Any]]:
    begin, last = bounds
    numbers = {call.started.call_id: number for number, call in enumerate(run_calls)}
    positions = {key: number for number, key in enumerate(lanes)}
    flows, ahead = handoffs(events), overlaps(run_calls)
    result: list[dict[str, Any]] = []
    for call in run_calls:
        key, name = (call.agent, call.started.engine), call.started.call_id
        end = call.ended.at if call.ended is not None else last
        lanes[key].models.add(call.started.model)
        overlap = ahead.get(name)
        token = call.first_token
        result.append(
            {
                "lane": positions[key],
                "row": lanes[key].place(call, end),
                "start": _time(call.started.at, begin),
                "token": _time(token, begin) if token is not None else None,
                "end": _time(end, begin),
                "failed": call.ended.error if isinstance(call.ended, CallFailed) else None,
                "open": call.ended is None,
                "model": call.started.model,
                "text": call.finished.text[:200] if call.finished is not None else "",
                "link": link_status(call),
                "spans": [
                    [_time(start, begin), _time(stop, begin), tokens]
                    for start, stop, tokens in _spans(call)
                ],
                "overlap": asdict(overlap) if overlap is not None else None,
                "from": [
                    [numbers[flow.writer], _time(flow.start, begin), _time(flow.end, begin)]
                    for flow in flows.get(name, ())
                ],
                "cells": row(call, overlap),
            }
        )
    return result


def _lane_data(lane: _PageLane) -> dict[str, Any]:
    models = ", ".join(sorted(model for model in lane.models if model))
    rows = max(1, len(lane.rows))
    return {"agent": lane.agent, "engine": lane.engine, "model": models, "rows": rows}


def _note_data(note: Note, lanes: dict[tuple[str, str], _PageLane], begin: float) -> dict[str, Any]:
    keys = list(lanes)
    key = (note.agent, note.engine)
    if key not in lanes:
        key = next(key for key in reversed(keys) if key[0] == note.agent)
    return {
        "lane": keys.index(key),
        "at": _time(note.at, begin),
        "kind": note.kind,
        "text": note.text,
    }


def _spans(call: Call) -> list[tuple[float, float, int]]:
    stream = call.usage.prompt_stream if call.usage is not None else None
    spans = stream.prefills if stream is not None else []
    return sorted((span.start, span.end, span.tokens) for span in spans)


def _time(at: float, begin: float) -> float:
    return round(at - begin, ndigits=4)
