"""Reports show what links gained, hold no texts, and hold only the last events."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable

from rich.console import Console

from flashmoa import observe
from flashmoa.observe.events import FIRST, Listener, ignore
from flashmoa.observe.report import Report
from flashmoa.observe.timeline import lanes
from tests.unit.events import closed, opened
from tests.unit.observe.test_summary import call, use


def reported(events: Iterable[observe.Event], listener: Listener = ignore) -> Report:
    report = Report(listener)
    for event in events:
        report(event)
    return report


def test_a_report_shows_calls_and_gains() -> None:
    heard: list[observe.Event] = []
    assert str(Report()) == "No call has finished."
    events = [*call("A", 0, 2, 8), *call("B", 8, 8.5, 10, use((0, 4)))]
    report = reported(events, heard.append)
    shown = str(report)
    assert "1 of 2 calls linked" in shown and "B" in shown and "hit" in shown
    assert (report.summary.linked, report.notes, heard) == (1, [], events)
    # Only the words that are in the table are explained.
    assert "link: hit: its prompt began with its stream\n" in shown
    assert "Not prefilled ahead" not in shown and "What failed" not in shown
    # Notebooks show it as HTML.
    assert "calls linked" in report._repr_mimebundle_([], [])["text/html"]


def test_a_report_says_why_nothing_was_linked() -> None:
    events: list[observe.Event] = []
    for number, agent in enumerate("ABCDEFA"):
        reason = FIRST if not number else "its workflow is not linked"
        more = {"id_": f"{number}", "unlinked": reason}
        events += call(agent, number, number + 0.5, number + 1, **more)
    waits = {"engine": "http://e", "upstream": "A", "reason": "it decides who speaks"}
    events += [observe.LinkWaits(agent=agent, at=1, **waits) for agent in "BC"]
    events += [closed(why, 8, None) for why in ("unused", "abort", "mispredicted")]
    shown = str(reported(events))
    assert "0 of 7 calls linked\n" in shown
    assert "link: first: it began the run; none: not linked, see below\n" in shown
    assert "  B, C, D, E, 2 more: its workflow is not linked\n" in shown
    assert "  B, C: the text of A is not streamed to it: it decides who speaks\n" in shown
    assert "1 unused, 1 abort, 1 mispredicted" in shown and "the link ended" not in shown
    assert "What failed" not in shown


def test_failures_are_shown_apart() -> None:
    who = {"agent": "B", "engine": "http://e"}
    declined = observe.LinkDeclined(**who, at=3, reason="no room")
    failed = observe.UpstreamFailed(**who, at=5, upstream="A", failure="stall", action="abort")
    events = [*call("A", 0, 1, 2), declined, closed("OSError: no", 4, None), failed]
    ordinary, _, failed = str(reported(events)).partition("\nWhat failed\n")
    assert ordinary.endswith("Not prefilled ahead, and why\n  B: no room\n")
    assert failed.splitlines() == [
        "  4.00 s, B: its link failed: OSError: no",
        "  5.00 s, B: A failed (stall); action: abort",
    ]


def test_open_links_are_counted() -> None:
    links = [opened(), opened(stream_id="t"), closed("used")]
    report = reported([*call("A", 0, 2, 8), *links])
    assert report.links == {"used": 1, "still open": 1}
    assert "links, by why they ended: 1 used, 1 still open" in str(report)


def test_a_report_holds_the_last_events_without_texts() -> None:
    report = Report()
    who = {"agent": "A", "engine": "http://e", "call_id": "a"}
    report(observe.PromptSent(**who, messages=[{"role": "user", "content": "secret"}]))
    for _ in range(5000):
        report(observe.FirstToken(**who))
    report(observe.CallFinished(**who, text="secret"))
    assert len(report.events) < 5000 and "secret" not in repr(report.events)
    assert not any(isinstance(event, observe.PromptSent) for event in report.events)


def test_a_live_timeline_has_what_has_not_ended() -> None:
    report, out = Report(), io.StringIO()
    began = time.time()
    with report.live(Console(file=out, force_terminal=True, width=60)):
        for event in call("A", began - 4, began - 2, 0)[:2]:
            report(event)
        link = {"agent": "B", "engine": "http://e", "stream_id": "s"}
        report(opened(at=began - 3))
        report(observe.LinkAdvanced(**link, received_tokens=9, prefilled_tokens=9, at=began - 1))
    shown = [line for line in out.getvalue().splitlines() if "|" in line][-2:]
    assert "A |" in shown[0] and "·" in shown[0] and "█" in shown[0]
    assert "B |" in shown[1] and "░" in shown[1] and "█" not in shown[1]
    assert lanes(report.events)[0].bars == []
