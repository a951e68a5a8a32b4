"""Compute a run's figures: prefills ahead of each call (``overlaps``), totals (``summary``), rows
for a table of calls (``row``), and remarks on failures and missing links (``notes``).

The engine reports when it prefilled a call's prompt stream. Prefills before the call's request are
*ahead*; the time from the request to the first token is *left*. The time ahead is not time saved:
it includes waiting in the engine and forwards shared with other requests. Only a run without links
tells the time saved (``flashmoa bench workflows``). Engine and client use their own clocks, which
must agree if they run on two machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

from flashmoa.engine import Span
from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import (
    FIRST,
    LATE,
    ORDINARY_ENDS,
    WHOLE,
    CallFailed,
    Event,
    LinkClosed,
    LinkDeclined,
    LinkOpened,
    LinkWaits,
    UpstreamFailed,
)

# An engine may leave this many tokens of an open stream to its request (``docs/engine-api.md``).
_MAX_LEFT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Overlap:
    """The prefill ahead of a call that found its prompt stream (``hit``).

    Attributes:
        ahead: seconds of the stream's prefills before the request was sent.
        left: seconds from the request to the first token: the rest of the prefill, the queue, the
            network and one decode step; ``None`` if the answer came as a whole.
        ahead_tokens: number of prompt tokens that the stream computed before the request was sent.
        left_tokens: number of prompt tokens that the stream or the request computed later. (A
            request waits for a prefill of its stream that has just begun.)
        unlinked: estimate of ``left`` without the link, by the engine's measured costs; ``None``
            if these or ``left`` are missing.
        delay: estimate of how much later other answers of the engine got their next tokens, added
            up over the stream's prefills; ``None`` if the engine does not say.
    """

    ahead: float
    left: float | None
    ahead_tokens: int
    left_tokens: int
    unlinked: float | None = None
    delay: float | None = None


def overlaps(calls: Sequence[Call]) -> dict[str, Overlap]:
    """Return the overlap of each call that found its prompt stream, by ``call_id``."""
    computed = {call.started.call_id: _compute_overlap(call) for call in calls}
    return {call_id: overlap for call_id, overlap in computed.items() if overlap is not None}


def _compute_overlap(call: Call) -> Overlap | None:
    usage, sent = call.usage, call.started.at
    stream = usage.prompt_stream if usage is not None else None
    if usage is None or stream is None or stream.status != "hit":
        return None
    left = call.wait
    streamed, saved = usage.streamed_tokens or 0, stream.saved_seconds
    ahead_tokens = max(0, streamed - _count_tokens_after(stream.prefills, sent))
    unlinked: float | None = None
    if left is not None and saved is not None:
        unlinked = left + (saved * ahead_tokens / streamed if streamed else 0.0)
    return Overlap(
        ahead=_covered((span.start, min(span.end, sent)) for span in stream.prefills),
        left=left,
        ahead_tokens=ahead_tokens,
        left_tokens=streamed - ahead_tokens + (usage.late_tokens or 0),
        unlinked=unlinked,
        delay=_total([span.delay_seconds for span in stream.prefills]),
    )


def _total(values: Sequence[float | None]) -> float | None:
    """Return the sum; ``None`` if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _count_tokens_after(prefills: Sequence[Span], sent: float) -> int:
    """Return the number of tokens computed after ``sent``, if each prefill advances evenly."""
    return round(
        sum(
            span.tokens * min(1.0, (span.end - sent) / (span.end - span.start or 1.0))
            for span in prefills
            if span.end > sent
        )
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    total, last = 0.0, -inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a whole run.

    Attributes:
        end_to_end: seconds from the first request to the end of the last call.
        calls, failed: number of calls, and number of failed calls.
        first_token: median seconds from request to first token; ``None`` if no call had one.
        linked: number of calls that found their prompt streams, or are ``untold``.
        untold: number of calls that used links but have no figures: the engine has no plugin, or
            the answer has no usage.
        no_gain: number of linked calls whose streams had computed nothing.
        overlap: sum of the calls' overlaps. ``left`` adds up the known values; ``unlinked`` is
            ``None`` unless it is known for each call with a known ``left``, and so is ``delay``.
    """

    end_to_end: float
    calls: int
    failed: int
    first_token: float | None
    linked: int
    no_gain: int
    overlap: Overlap
    untold: int = 0

    def __str__(self) -> str:
        overlap = self.overlap
        linked = f"{self.linked:,} of {self.calls:,} calls linked"
        text = f"end to end {seconds(self.end_to_end)}; {linked}"
        if self.untold:
            text += f", {self.untold:,} of these without figures of what that gained"
        if self.no_gain:
            text += f" ({self.no_gain:,} of these gained nothing)"
        if not overlap.ahead_tokens:
            return text
        whose = "the others'" if self.untold else "their"
        text += (
            f". Of {whose} prompt tokens, "
            f"{overlap.ahead_tokens:,} were prefilled ahead and "
            f"{overlap.left_tokens:,} were left to compute"
        )
        if overlap.left is None:
            return text
        text += f"; their first tokens came {seconds(overlap.left)} after their requests, added up"
        if overlap.unlinked is None:
            return text
        text += f", instead of about {seconds(overlap.unlinked)}, by the engine's measured costs"
        if overlap.delay is None:
            return text
        held_up = seconds(overlap.delay)
        return f"{text}; estimated delay of answers being written meanwhile: {held_up} in all"


def summary(calls: Sequence[Call]) -> Summary:
    """Return the figures of a run, given its calls."""
    starts = [call.started.at for call in calls]
    ends = [call.ended.at for call in calls if call.ended is not None]
    waits = [call.wait for call in calls if call.wait is not None]
    hits = overlaps(calls).values()
    statuses = Counter(map(link_status, calls))
    untold = statuses["plain"] + statuses["not told"]
    left = [hit.left for hit in hits if hit.left is not None]
    unlinked = [hit.unlinked for hit in hits if hit.unlinked is not None]
    return Summary(
        end_to_end=max(ends) - min(starts) if ends else 0.0,
        calls=len(calls),
        failed=sum(isinstance(call.ended, CallFailed) for call in calls),
        first_token=median(waits) if waits else None,
        linked=len(hits) + untold,
        no_gain=statuses["no gain"],
        overlap=Overlap(
            ahead=sum(hit.ahead for hit in hits),
            left=sum(left) if left else None,
            ahead_tokens=sum(hit.ahead_tokens for hit in hits),
            left_tokens=sum(hit.left_tokens for hit in hits),
            unlinked=sum(unlinked) if unlinked and len(unlinked) == len(left) else None,
            delay=_total([hit.delay for hit in hits]),
        ),
        untold=untold,
    )


def count_links(events: Sequence[Event]) -> dict[str, int]:
    """Return the number of links by reason of their end; some may be ``still open``."""
    closed = [event for event in events if isinstance(event, LinkClosed)]
    ended = {event.stream_id for event in closed}
    opened = [event for event in events if isinstance(event, LinkOpened)]
    still_open = sum(event.stream_id not in ended for event in opened)
    counts = dict(Counter(event.reason for event in closed).most_common())
    return counts | ({"still open": still_open} if still_open else {})


def seconds(value: float) -> str:
    """Format a time for readers: ``412 ms``, ``3.21 s``, ``39 min 37 s``."""
    if abs(value) < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 600:
        return f"{value:.2f} s"
    return f"{int(value // 60)} min {int(value % 60)} s"


COLUMNS = (
    "agent",
    "prompt",
    "cached",
    "streamed",
    "late",
    "written",
    "ahead",
    "first token",
    "link",
)
"""Columns of a table of calls: numbers of tokens, and the times ``ahead`` and ``first token``.

A prompt token is ``cached`` or ``late``. A ``streamed`` token is a cached token that the link had
computed (without the plugin: asked for).
"""

LINK_WORDS = {
    "first": "it began the run",
    "whole": "its prompt was complete when it was asked",
    "none": "not linked, see below",
    "hit": "its prompt began with its stream",
    "no gain": "a hit, but nothing was computed ahead",
    "late": "it came before its stream was open",
    "mispredicted": "its prompt differs from its stream",
    "plain": "prefilled without the plugin",
    "elsewhere": "it went to another engine than its stream",
    "unfinished": "it came before its stream was complete",
    "used": "another request had used its stream",
    "deleted": "its stream had been given up",
    "expired": "its stream had expired",
    "drained": "the engine had closed its stream",
    "other_namespace": "its namespace is not its stream's",
    "unknown": "the engine did not know its stream",
    "not told": "the answer does not say how its stream was used",
}
"""Meanings of the words in the column ``link``. Some are the engine's (``StreamUse.status``)."""


def row(call: Call, overlap: Overlap | None) -> list[str]:
    """Return one cell for each of ``COLUMNS``; empty if the engine does not report the value."""
    usage = call.usage
    numbers: list[int | None] = [None] * 5
    if usage is not None:
        numbers = [
            usage.prompt_tokens,
            usage.cached_tokens,
            call.plain_tokens if usage.streamed_tokens is None else usage.streamed_tokens,
            usage.late_tokens,
            usage.completion_tokens,
        ]
    ahead = seconds(overlap.ahead) if overlap is not None else ""
    tokens = ["" if number is None else str(number) for number in numbers]
    return [call.agent, *tokens, ahead, _first_token(call), link_status(call)]


def link_status(call: Call) -> str:
    """Return one of :data:`LINK_WORDS`; empty if nothing is known, as in an old trace."""
    if (usage := call.usage) is not None and usage.prompt_stream is not None:
        overlap = _compute_overlap(call)
        gained = overlap is None or usage.streamed_tokens is None or overlap.ahead_tokens
        return usage.prompt_stream.status if gained else "no gain"
    if call.plain_tokens is not None:
        return "plain"
    if call.found is not None and call.finished is not None:
        return "elsewhere"
    if call.link_end == "unfinished":
        return "unfinished"
    if call.started.late:
        return "late"
    if call.started.unlinked:
        return {FIRST: "first", WHOLE: "whole"}.get(call.started.unlinked, "none")
    return "not told" if call.started.stream_id and call.finished is not None else ""


def _first_token(call: Call) -> str:
    parts = [] if call.wait is None else [seconds(call.wait)]
    if call.ended is None:
        parts.append("not ended")
    elif isinstance(call.ended, CallFailed):
        parts.append("failed")
    return ", ".join(parts)


NoteKind = Literal[
    "failed",
    "upstream failed",
    "link failed",
    "unlinked",
    "declined",
    "late",
    "no gain",
    "mispredicted",
    "waits",
    "ended",
]
FAILURES: tuple[NoteKind, ...] = ("failed", "upstream failed", "link failed")


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about an agent; ``engine`` is empty if the event names no engine."""

    at: float
    agent: str
    engine: str
    kind: NoteKind
    text: str


def notes(events: Sequence[Event]) -> list[Note]:
    """Return the notes of a run in the order of their times."""
    declined = {(event.agent, event.reason) for event in events if isinstance(event, LinkDeclined)}
    remarks = [(event, _remark_on(event)) for event in events]
    remarks += [
        (call.started, _remark_on_call(call))
        for call in calls(events)
        if (call.agent, call.started.unlinked) not in declined
    ]
    found = [
        Note(event.at, event.agent, event.engine, *remark)
        for event, remark in remarks
        if remark is not None
    ]
    return sorted(found, key=lambda note: note.at)


def _remark_on(event: Event) -> tuple[NoteKind, str] | None:
    match event:
        case CallFailed():
            return "failed", f"the call failed: {event.error}"
        case LinkDeclined():
            return "declined", event.reason
        case LinkWaits():
            text = f"the text of {event.upstream} is not streamed to it: {event.reason}"
            return "waits", text
        case UpstreamFailed():
            text = f"{event.upstream} failed ({event.failure}); action: {event.action}"
            return "upstream failed", text
        case LinkClosed(reason="mispredicted"):
            return "mispredicted", "the conversation took another course; the link was closed"
        case LinkClosed() if event.reason not in ORDINARY_ENDS:
            return "link failed", f"its link failed: {event.reason}"
        case LinkClosed() if event.reason not in ("used", "closed"):
            return "ended", f"the link ended: {event.reason}"
        case _:
            return None


def _remark_on_call(call: Call) -> tuple[NoteKind, str] | None:
    match link_status(call):
        case "mispredicted":
            text = "its prompt differs from its stream"
            return "mispredicted", f"{text}; the engine computed the rest with the request"
        case "no gain":
            return "no gain", _why_no_gain(call)
        case "late":
            return "late", LATE
        case "none":
            return "unlinked", call.started.unlinked
        case _:
            return None


def _why_no_gain(call: Call) -> str:
    usage = call.usage
    if usage is not None and usage.streamed_tokens:
        return "the engine began with its stream only when its request was sent"
    if usage is None or usage.late_tokens is None or usage.late_tokens > _MAX_LEFT_TOKENS:
        return "the engine had not begun with its stream when its request came"
    return f"too few tokens were new: an engine leaves up to {_MAX_LEFT_TOKENS} to the request"
