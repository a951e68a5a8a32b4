"""Reports show what links gained, hold no texts, and hold only the last events."""

from __future__ import annotations

import io
import time

from rich.console import Console

from flashmoa.observe import (
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkAdvanced,
    LinkOpened,
    PromptSent,
)
from flashmoa.observe.report import Report
from flashmoa.observe.timeline import lanes
from tests.unit.observe.test_summary import call, use


def test_a_report_shows_calls_gains_and_what_went_wrong() -> None:
    heard: list[Event] = []
    report = Report(heard.append)
    assert str(report) == "No call has finished."
    events = [*call("A", 0, 2, 8), *call("B", 8, 8.5, 10, use((0, 4)))]
    for event in events:
        report(event)
    shown = str(report)
    assert "1 of 2 calls linked" in shown and "B" in shown and "hit" in shown
    assert (report.summary.linked, report.notes, heard) == (1, [], events)
    # Notebooks show it as HTML.
    assert "calls linked" in report._repr_mimebundle_([], [])["text/html"]


def test_a_report_of_a_long_lived_link_holds_the_last_events_and_no_texts() -> None:
    report = Report()
    who = {"agent": "A", "engine": "http://e", "call_id": "a"}
    report(PromptSent(**who, messages=[{"role": "user", "content": "secret"}]))
    for _ in range(5000):
        report(FirstToken(**who))
    report(CallFinished(**who, text="secret"))
    assert len(report.events) < 5000 and "secret" not in repr(report.events)
    assert not any(isinstance(event, PromptSent) for event in report.events)


def test_a_live_timeline_has_what_has_not_ended() -> None:
    report, out = Report(), io.StringIO()
    began = time.time()
    console = Console(file=out, force_terminal=True, width=60)
    with report.live(console):
        who = {"agent": "A", "engine": "http://e", "call_id": "a"}
        report(CallStarted(**who, at=began - 4))
        report(FirstToken(**who, at=began - 2))
        link = {"agent": "B", "engine": "http://e", "stream_id": "s"}
        report(LinkOpened(**link, upstream=("A",), at=began - 3))
        report(LinkAdvanced(**link, received_tokens=9, prefilled_tokens=9, at=began - 1))
    shown = [line for line in out.getvalue().splitlines() if "|" in line][-2:]
    assert "A |" in shown[0] and "·" in shown[0] and "█" in shown[0]
    assert "B |" in shown[1] and "░" in shown[1] and "█" not in shown[1]
    assert lanes(report.events)[0].bars == []
