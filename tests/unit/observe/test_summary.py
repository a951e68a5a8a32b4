"""Test the figures of runs, how reports show them, and what reports hold."""

import io
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flashmoa import observe
from flashmoa.engine import PromptUsage, Span, StreamFigures, StreamUse
from flashmoa.observe.calls import calls, handoffs
from flashmoa.observe.events import FIRST, LATE, WHOLE, Listener, ignore
from flashmoa.observe.report import Report
from flashmoa.observe.summary import (
    LINK_WORDS,
    Overlap,
    count_links,
    link_status,
    notes,
    overlaps,
    row,
    seconds,
    summary,
)
from flashmoa.observe.timeline import lanes
from tests.conftest import ROOT
from tests.unit.events import answered, closed, opened

E = {"engine": "http://e"}


def used(use: StreamUse | None = None, **tokens: int) -> PromptUsage:
    """Return the usage of a call, given its prompt stream and other numbers of tokens."""
    numbers = {"prompt_tokens": 100, "completion_tokens": 9, "streamed_tokens": 70}
    return PromptUsage(**{**numbers, "late_tokens": 10, **tokens}, prompt_stream=use)


def call(
    agent: str,
    at: float,
    token: float | None,
    end: float,
    use: StreamUse | None = None,
    **more: Any,
) -> list[observe.Event]:
    """Return the events of a call that used its link so."""
    stream = use.id if use is not None else None
    return answered(agent, at, token, end, **{"usage": used(use), "stream_id": stream, **more})


def use(*spans: tuple[float, float], status: str = "hit") -> StreamUse:
    prefills = [Span(start=start, end=end, tokens=1) for start, end in spans]
    return StreamUse(id="s", status=status, prefills=prefills)


def test_prefill_counts_until_the_call() -> None:
    # B is sent at 8: its prefills run from 0 to 4, 6 to 7 and 7.5 to 9.
    found = calls([*call("A", 0, 2, 8), *call("B", 8, 8.5, 10, use((0, 4), (6, 7), (7.5, 9)))])
    assert overlaps(found) == {"B": Overlap(5.5, 0.5, 69, 11)}
    # Overlapping spans of a stream count once.
    found = calls([*call("A", 0, 2, 8), *call("B", 8, 8.5, 10, use((1, 4), (3, 5), (9, 9.5)))])
    assert overlaps(found)["B"] == Overlap(4.0, 0.5, 69, 11)


@given(
    st.lists(st.tuples(st.floats(0, 16), st.floats(0.1, 4), st.integers(1, 99)), max_size=5),
    st.integers(0, 300),
)
def test_tokens_after_the_request_are_late(
    prefills: list[tuple[float, float, int]], cached: int
) -> None:
    """The request, sent at 8, has waited for them: they have saved nothing."""
    spans = [Span(start=start, end=start + took, tokens=n) for start, took, n in prefills]
    streamed = min(cached, sum(span.tokens for span in spans))
    stream = StreamUse(id="s", status="hit", prefills=spans, saved_seconds=2.0)
    usage = used(stream, prompt_tokens=400, streamed_tokens=streamed)
    events = call("B", 8, 20, 21, stream, usage=usage)
    (found,) = calls(events)
    overlap = overlaps([found])["B"]
    assert overlap.unlinked is not None and 12 <= overlap.unlinked <= 14
    assert 0 <= overlap.ahead_tokens <= streamed
    assert overlap.left_tokens == streamed + 10 - overlap.ahead_tokens
    if all(span.end <= 8 for span in spans) and streamed:
        assert (overlap.ahead_tokens, overlap.unlinked) == (streamed, 14)
    if all(span.start >= 8 for span in spans):
        assert (overlap.ahead_tokens, overlap.unlinked) == (0, 12)
        assert link_status(found) == "no gain"
        reason = "only when its request was sent" if streamed else "too few tokens were new"
        assert reason in notes(events)[0].text


@pytest.mark.parametrize("status", ["mispredicted", "expired"])
def test_stream_without_hit_has_no_overlap(status: str) -> None:
    found = calls([*call("A", 0, 2, 8), *call("B", 8, 9, 10, use((0, 4), status=status))])
    assert overlaps(found) == {}
    whole = summary(found)
    assert (whole.linked, whole.calls, whole.overlap.ahead) == (0, 2, 0)
    assert row(found[1], None)[-3:] == ["", "1.00 s", status]


def test_figures_of_a_front_end_come_after_answers() -> None:
    plain = PromptUsage(prompt_tokens=100, completion_tokens=9, cached_tokens=64)
    events = call("B", 8, 8.5, 10, usage=plain, stream_id="http://w s")
    figures = StreamFigures(
        cached_tokens=90, streamed_tokens=70, late_tokens=10, prompt_stream=use((0, 4))
    )
    found = observe.StreamFound(**E, agent="B", at=11, stream_id="http://w s", figures=figures)
    (last,) = calls([*events, found])
    assert overlaps([last]) == {"B": Overlap(4.0, 0.5, 70, 10)}
    assert row(last, None)[1:6] == ["100", "90", "70", "10", "9"]
    unfinished = closed("unfinished", 11, "http://w s")
    for more, status in (
        ([replace(found, figures=None)], "elsewhere"), ([unfinished], "unfinished"),
        ([], "not told"),
    ):  # fmt: skip
        (last,) = calls([*events, *more])
        assert (row(last, None)[2], row(last, None)[-1]) == ("64", status)


def test_summary_has_the_figures_of_a_run() -> None:
    failed = {"agent": "C", "engine": "http://e", "call_id": "C"}
    events = [
        *call("A", 0, 2, 8),
        *call("B", 8, 8.5, 10, use((0, 4))),
        observe.CallStarted(**failed, at=10),
        observe.CallFailed(**failed, at=11, error="no"),
    ]
    whole = summary(calls(events))
    assert (whole.end_to_end, whole.failed, whole.first_token) == (11, 1, 1.25)
    assert str(whole) == (
        "end to end 11.00 s; 1 of 3 calls linked. Of their prompt tokens, 70 were prefilled ahead "
        "and 10 were left to compute; their first tokens came 500 ms after their requests, added up"
    )
    assert row(calls(events)[2], None) == ["C", "", "", "", "", "", "", "failed", ""]
    assert summary([]).end_to_end == 0
    assert [seconds(x) for x in (0.0004, 0.9996, 2377)] == ["0 ms", "1.00 s", "39 min 37 s"]


def test_a_hit_counts_whose_answer_came_as_a_whole() -> None:
    """It has no first token: agents with tools may not ask for a stream."""
    first, hit = call("A", 0, 2, 8), use((0, 4))
    whole = summary(calls([*call("A", 0, None, 8), *call("B", 8, None, 10, hit)]))
    assert (whole.linked, whole.overlap) == (1, Overlap(4.0, None, 70, 10))
    assert str(whole).endswith("70 were prefilled ahead and 10 were left to compute")
    last = call("C", 10, None, 12, use((5, 6)))
    more = summary(calls([*first, *call("B", 8, 8.5, 10, hit), *last]))
    assert (more.linked, more.overlap.left, more.overlap.ahead_tokens) == (2, 0.5, 140)


def test_the_wait_is_compared_with_the_estimate() -> None:
    use = StreamUse(id="s", status="hit", saved_seconds=2.0)
    events = [*call("A", 0, 1, 2, use), *call("B", 2, 2.5, 3, use)]
    whole = summary(calls(events))
    assert whole.overlap.unlinked == 5.5
    assert str(whole).endswith(
        "came 1.50 s after their requests, added up, instead of about 5.50 s, by the "
        "engine's measured costs; estimated delay of answers being written meanwhile: 0 ms in all"
    )
    delays = [Span(start=0, end=1, tokens=1, delay_seconds=delay) for delay in (0.5, 0.25)]
    first, second = (
        [*call(name, 2, 2.5, 3, use.model_copy(update={"prefills": delays}))] for name in "AB"
    )
    assert str(summary(calls([*first, *second]))).endswith(
        "costs; estimated delay of answers being written meanwhile: 1.50 s in all"
    )
    untold = call(
        "C", 2, 2.5, 3, use.model_copy(update={"prefills": [Span(start=0, end=1, tokens=1)]})
    )
    assert str(summary(calls([*first, *untold]))).endswith("by the engine's measured costs")
    unknown = call("C", 3, 4, 5, StreamUse(id="s", status="hit"))
    assert summary(calls([*events, *unknown])).overlap.unlinked is None


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (9, "too few tokens were new: an engine leaves up to 128 to the request"),
        (900, "the engine had not begun with its stream when its request came"),
    ],
)
def test_a_hit_that_gained_nothing_says_why(late: int, why: str) -> None:
    usage = used(use(), streamed_tokens=0, late_tokens=late)
    events = call("A", 0, 1, 2, use(), usage=usage)
    [found] = calls(events)
    assert row(found, None)[-1] == "no gain"
    assert str(summary([found])).endswith("1 of 1 calls linked (1 of these gained nothing)")
    assert [(note.kind, note.text) for note in notes(events)] == [("no gain", why)]


@pytest.mark.parametrize(
    ("unlinked", "late", "status", "kinds"),
    [
        (FIRST, False, "first", []),
        (WHOLE, False, "whole", []),
        (LATE, True, "late", ["late"]),
        ("its agent sleeps", False, "none", ["unlinked"]),
        # An old trace does not say.
        ("", True, "late", ["late"]),
        ("", False, "", []),
    ],
)
def test_an_unlinked_call_has_a_word_and_a_reason(
    unlinked: str, late: bool, status: str, kinds: list[str]
) -> None:
    events = call("A", 0, 1, 2, unlinked=unlinked, late=late)
    (found,) = calls(events)
    assert link_status(found) == row(found, None)[-1] == status
    assert [note.kind for note in notes(events)] == kinds
    assert all(note.text in (unlinked, LATE) for note in notes(events))


def test_a_reason_without_a_link_is_told_once() -> None:
    """The planner declines it once; each of its calls says why it has no link."""
    why = "its agent sleeps"
    declined = [observe.LinkDeclined(agent=name, engine="", at=0, reason=why) for name in "AB"]
    events = call("A", 1, 2, 3, unlinked=why)
    found = [(note.agent, note.kind) for note in notes([*declined, *events])]
    assert found == [("A", "declined"), ("B", "declined")]
    assert [note.kind for note in notes(events)] == ["unlinked"]


def test_every_status_of_an_engine_has_a_meaning() -> None:
    """A report explains each status that its table shows."""
    text = (ROOT / "docs" / "engine-api.md").read_text()
    listed = text[text.index("`prompt_stream.status`") : text.index("`prompt_stream.prefills`")]
    statuses = set(re.findall(r"`([a-z_]+)`", listed))
    assert statuses >= {"hit", "expired"} and statuses <= LINK_WORDS.keys()


@given(st.lists(st.sampled_from(["used", "unused", "OSError: no", ""]), max_size=8))
def test_each_link_is_counted_by_its_end(ends: list[str]) -> None:
    events: list[observe.Event] = [closed("too late", stream_id=None)]
    for number, reason in enumerate(ends):
        events.append(opened(stream_id=f"{number}"))
        if reason:
            events.append(closed(reason, stream_id=f"{number}"))
    counted = count_links(events)
    assert counted == Counter(reason or "still open" for reason in [*ends, "too late"])
    assert "still open" not in list(counted)[:-1]


@pytest.mark.parametrize("is_plain", [True, False])
def test_links_without_figures_count_as_linked(is_plain: bool) -> None:
    """A plain engine has none, and neither has an answer without usage. The links were used."""
    usage = PromptUsage(prompt_tokens=9, completion_tokens=1)
    link = opened("P", stream_id="p", plain=is_plain)
    plain = [link, *call("P", 1, 2, 3, usage=usage, stream_id="p")]
    whole = summary(calls(plain))
    assert (whole.linked, whole.untold, whole.overlap.ahead_tokens) == (1, 1, 0)
    assert str(whole).endswith("1 calls linked, 1 of these without figures of what that gained")
    mixed = summary(calls([*plain, *call("B", 8, 8.5, 10, use((0, 4)))]))
    assert "2 of 2 calls linked, 1 of these without figures" in str(mixed)
    assert "Of the others' prompt tokens, 70 were prefilled ahead" in str(mixed)


def written(name: str, at: float, end: float) -> list[observe.Event]:
    """Return a call of agent A with an id of its own; its first text comes half a second later."""
    return answered("A", at, at + 0.5, end, id_=name)


@pytest.mark.parametrize(
    ("at", "upstream", "events", "expected"),
    [
        # B wrote while A did; B's text could stream only after A's was complete.
        (0.5, ("user", "A", "B"), [*call("A", 0, 1, 4), *call("B", 0, 2, 6)], "A 1 4, B 4 6"),
        # A had ended when the link was opened, so that no text streamed; then A wrote again.
        (3, ("A",), call("A", 0, 1, 2), ""),
        (3, ("A",), [*call("A", 0, 1, 2), *written("again", 3, 4)], "again 3.5 4"),
        # Another run that has the same agents goes on, or ends before.
        (2, ("A",), [*written("mine", 1, 6.5), *written("other", 1.5, 30)], "mine 1.5 6.5"),
        (2, ("A",), [*written("mine", 1, 6.5), *written("other", 1.5, 5)], "mine 1.5 6.5"),
        # A reader may be sent while a writer still writes.
        (0, ("A",), call("A", 0, 1, 9), "A 1 7"),
    ],
)
def test_handoffs_follow_the_prompts_order(
    at: float, upstream: tuple[str, ...], events: list[observe.Event], expected: str
) -> None:
    link = opened("M", at, upstream=upstream)
    found = handoffs([link, *events, *call("M", 7, 8, 9, use((1, 2)))])["M"]
    assert ", ".join(f"{one.writer} {one.start:g} {one.end:g}" for one in found) == expected


def test_notes_name_failures_and_declined_links() -> None:
    who = {**E, "agent": "B"}
    failed = observe.UpstreamFailed(**who, at=6, upstream="A", failure="stall", action="finalize")
    events: list[observe.Event] = [
        *(closed(why, at) for why, at in (("used", 9), ("mispredicted", 8), ("unused", 7))),
        failed,
        observe.LinkWaits(**who, at=5, upstream="A", reason="it calls tools"),
        observe.LinkDeclined(**who, at=4, reason="no room"),
        observe.CallStarted(**who, at=3, call_id="1", late=True),
        *call("C", 10, 11, 12, use((1, 2), status="mispredicted")),
        closed("OSError: no", 20),
    ]
    kinds = ["late", "declined", "waits", "upstream failed", "ended", "mispredicted"]
    assert [(note.agent, note.kind) for note in notes(events)] == [
        *(("B", kind) for kind in kinds), ("C", "mispredicted"), ("B", "link failed")
    ]  # fmt: skip
    assert "A failed (stall); action: finalize" in [note.text for note in notes(events)]


@pytest.mark.parametrize("plain", [True, False])
def test_a_row_has_the_tokens_of_a_plain_link(plain: bool) -> None:
    usage = PromptUsage(prompt_tokens=100, completion_tokens=9, cached_tokens=88)
    advanced = [
        observe.LinkAdvanced(
            **E, agent="B", at=at, stream_id="s", received_tokens=at, prefilled_tokens=at
        )
        for at in (50, 80)
    ]
    events = [opened(plain=plain), *advanced, *call("B", 90, 91, 92, usage=usage, stream_id="s")]
    streamed, status = ("80", "plain") if plain else ("", "not told")
    expected = ["B", "100", "88", streamed, "", "9", "", "1.00 s", status]
    assert row(calls(events)[0], None) == expected


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


def test_a_report_holds_few_events_and_no_text() -> None:
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
