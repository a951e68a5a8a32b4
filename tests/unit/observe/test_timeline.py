"""Test the timeline in the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from flashmoa.cli.trace import show
from flashmoa.engine import PromptUsage, Span, StreamUse
from flashmoa.observe import CallFinished, CallStarted, Event, FirstToken
from flashmoa.observe.timeline import LEGEND, draw, lanes

A = {"agent": "A", "engine": "http://a", "call_id": "a"}
B = {"agent": "B", "engine": "http://b", "call_id": "b"}
USE = StreamUse(id="s", status="hit", prefills=[Span(start=1.0, end=6.0, tokens=500)])
USAGE = PromptUsage(prompt_tokens=510, completion_tokens=3, prompt_stream=USE)
EVENTS: list[Event] = [
    CallStarted(**A, at=0.0),
    FirstToken(**A, at=2.0),
    CallFinished(**A, at=8.0, text="x"),
    CallStarted(**B, at=8.0),
    FirstToken(**B, at=8.5),
    CallFinished(**B, at=10.0, text="y", usage=USAGE),
]


def test_prefill_is_drawn_under_the_upstreams_decode() -> None:
    rows = draw(lanes(EVENTS), columns=44).splitlines()
    assert rows[0].startswith("A |") and rows[1].startswith("B |")
    assert all(len(row) <= 44 for row in rows[:3])
    ahead = [i for i, mark in enumerate(rows[1]) if mark == "░"]
    decode = [i for i, mark in enumerate(rows[0]) if mark == "█"]
    assert set(ahead[5:]) <= set(decode) | set(range(12))
    assert min(ahead) < min(decode) < max(ahead) < max(decode)
    assert "10.00 s" in rows[2]


@pytest.mark.parametrize(
    "name", ["an agent with a long name " * 9, "旅行計画を書くエージェント" * 9]
)
def test_long_and_wide_names_are_shortened(name: str) -> None:
    events = [replace(event, agent=name) if event.agent == "A" else event for event in EVENTS]
    first, second, *_ = draw(lanes(events), columns=60).splitlines()
    assert cell_len(first) == cell_len(second) <= 60
    assert cell_len(first.partition("|")[0]) == cell_len(second.partition("|")[0]) <= 21
    assert first.lstrip().startswith(name[:5]) and "…" in first


def test_lines_of_the_timeline_are_not_wrapped() -> None:
    out = io.StringIO()
    events = [replace(event, agent="the planner of trips") for event in EVENTS]
    show(events, Console(file=out, width=40, highlight=False))
    lines = out.getvalue().splitlines()
    assert next(line for line in lines if "█" in line and "|" in line).endswith("|")
    assert any(LEGEND in line for line in lines)


def test_an_agent_on_two_engines_has_two_lanes() -> None:
    moved = [replace(event, engine="http://c", call_id="c") for event in EVENTS[3:]]  # type: ignore[call-arg]
    assert len(lanes([*EVENTS, *moved])) == 3


def test_unfinished_call_has_no_bar() -> None:
    assert lanes(EVENTS[:2])[0].bars == []
    assert draw(lanes(EVENTS[:1])) == "(nothing happened)"
