"""A run as one HTML file that loads nothing and needs no network."""

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
from flashmoa.observe.notes import Note, notes
from flashmoa.observe.summary import COLUMNS, EXPLANATION, link_status, overlaps, row, summary

_SCRIPTS = ("format.js", "card.js", "layout.js", "chart.js", "view.js", "page.js")
# Characters of an answer that the page shows, and digits of its times.
_TEXT = 200
_DIGITS = 4


def page(events: Sequence[Event], title: str) -> str:
    """Return an HTML document of a run's events, headed by ``title``.

    Agents' names and texts may contain anything that users and models wrote: they are data of a
    script element that cannot be closed from within, put on the page as text only, and the page's
    policy runs no script but its own (Content Security Policy Level 3, hashes).
    """
    script = "\n".join(['"use strict";', *(_part(name) for name in _SCRIPTS)])
    style = _part("page.css")
    return Template(_part("template.html")).substitute(
        title=escape(title),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        style=style,
        script=script,
        run=_inert(json.dumps(run_data(events), separators=(",", ":"))),
    )


def _part(name: str) -> str:
    return files("flashmoa.observe.page").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _inert(text: str) -> str:
    """Escape JSON for a script element: nothing in it ends the element or begins a comment."""
    return text.replace("<", "\\u003c")


@dataclass(slots=True)
class _PageLane:
    """An agent on an engine. Calls that run at the same time have rows of their own."""

    agent: str
    engine: str
    models: set[str] = field(default_factory=set[str])
    # For each row: when its last call ends, and when the last prefill ahead of a call in it does.
    rows: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def place(self, call: Call, end: float) -> int:
        """Return the row of a call that ends at ``end``; earlier calls are placed first."""
        spans = _spans(call)
        start, ahead = call.started.at, spans[0][0] if spans else call.started.at
        prefilled = spans[-1][1] if spans else ahead
        for number, (busy, prefilling) in enumerate(self.rows):
            if busy <= start and prefilling <= ahead:
                self.rows[number] = (end, max(prefilling, prefilled))
                return number
        self.rows.append((end, prefilled))
        return len(self.rows) - 1


def run_data(events: Sequence[Event]) -> dict[str, Any]:
    """Return the lanes, calls, notes and figures of a run as JSON values, for the page's script.

    Times are seconds since the first event. ``calls`` refer to ``lanes`` by their index, and to
    the calls whose text they got, and when (``from``), by theirs. A call that is not known to have
    ended goes on to the last event.
    """
    found = calls(events)
    begin, end = _bounds(events, found)
    lanes = _lanes(found, remarks := notes(events))
    return {
        "begin": begin,
        "seconds": _time(end, begin),
        "summary": asdict(summary(found)),
        "explanation": EXPLANATION,
        "columns": COLUMNS,
        "calls": _calls(events, found, lanes, (begin, end)),
        "notes": [_note(one, lanes, begin) for one in remarks],
        "lanes": [_lane(one) for one in lanes.values()],
    }


def _bounds(events: Sequence[Event], found: Sequence[Call]) -> tuple[float, float]:
    times = [event.at for event in events]
    times += [at for call in found for span in _spans(call) for at in span[:2]]
    return min(times, default=0.0), max(times, default=0.0)


def _lanes(found: Sequence[Call], remarks: Sequence[Note]) -> dict[tuple[str, str], _PageLane]:
    """Make a lane for each agent on an engine.

    Those of one engine stand together, in the order of their first calls.
    """
    keys = [(call.agent, call.started.engine) for call in found]
    known = dict(keys)
    keys += [(note.agent, note.engine or known.get(note.agent, "")) for note in remarks]
    engines = list(dict.fromkeys(engine for _, engine in keys))
    ordered = sorted(dict.fromkeys(keys), key=lambda key: engines.index(key[1]))
    return {key: _PageLane(*key) for key in ordered}


def _calls(
    events: Sequence[Event],
    found: Sequence[Call],
    lanes: dict[tuple[str, str], _PageLane],
    bounds: tuple[float, float],
) -> list[dict[str, Any]]:
    begin, last = bounds
    numbers = {call.started.call_id: number for number, call in enumerate(found)}
    positions = {key: number for number, key in enumerate(lanes)}
    writers, ahead = handoffs(events), overlaps(found)
    result: list[dict[str, Any]] = []
    for call in found:
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
                "text": call.finished.text[:_TEXT] if call.finished is not None else "",
                "link": link_status(call),
                "spans": [
                    [_time(start, begin), _time(stop, begin), tokens]
                    for start, stop, tokens in _spans(call)
                ],
                "overlap": asdict(overlap) if overlap is not None else None,
                "from": [
                    [numbers[one.writer], _time(one.start, begin), _time(one.end, begin)]
                    for one in writers.get(name, ())
                ],
                "cells": row(call, overlap),
            }
        )
    return result


def _lane(lane: _PageLane) -> dict[str, Any]:
    models = ", ".join(sorted(model for model in lane.models if model))
    rows = max(1, len(lane.rows))
    return {"agent": lane.agent, "engine": lane.engine, "model": models, "rows": rows}


def _note(note: Note, lanes: dict[tuple[str, str], _PageLane], begin: float) -> dict[str, Any]:
    keys = list(lanes)
    key = (note.agent, note.engine)
    if key not in lanes:
        key = next(one for one in reversed(keys) if one[0] == note.agent)
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
    return round(at - begin, _DIGITS)
