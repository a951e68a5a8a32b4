"""Compute the figures of a run: what was prefilled ahead of each call (``overlaps``), the whole run
(``summary``), the rows of a table of its calls (``row``), and what went wrong (``notes``).

A call's prompt stream has the times at which the engine prefilled it. The part of these before the
call's request was sent is *ahead* of it; the time from the request to the first token is *left*.
The time ahead is not time saved: a prefill's span includes waiting for its turn and forwards shared
with others, and the time of a run without links is only known from such a run (``flashmoa bench
workflows``). Engine and client take times from their own clocks; on two machines these must agree.
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

# Most tokens of an open stream that an engine leaves to its request (``docs/engine-api.md``).
_MOST_LEFT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Overlap:
    """Says what was prefilled ahead of a call that found its prompt stream (``hit``).

    Attributes:
        ahead: seconds of its stream's prefills before its request was sent.
        left: seconds from the request to the first token: the rest of the prefill, the queue, the
            network and one decode step; ``None`` if the answer came as a whole.
        ahead_tokens: number of prompt tokens that the stream computed before the request was sent.
        left_tokens: number of prompt tokens that were computed later, by the stream or with the
            request: a request waits for a prefill of its stream that has just begun.
        unlinked: an estimate of what ``left`` would have been without the link, by the engine's
            measured costs; ``None`` without these, or without ``left``.
    """

    ahead: float
    left: float | None
    ahead_tokens: int
    left_tokens: int
    unlinked: float | None = None


def overlaps(calls: Sequence[Call]) -> dict[str, Overlap]:
    """Return the overlap of each call that found its prompt stream, by ``call_id``."""
    computed = {call.started.call_id: _compute_overlap(call) for call in calls}
    return {call_id: overlap for call_id, overlap in computed.items() if overlap is not None}


def _compute_overlap(call: Call) -> Overlap | None:
    usage, sent = call.usage, call.started.at
    stream = usage.prompt_stream if usage is not None else None
    if usage is None or stream is None or stream.status != "hit":
        return None
    left = call.first_token - sent if call.first_token is not None else None
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
    )


def _count_tokens_after(prefills: Sequence[Span], sent: float) -> int:
    """Return how many tokens were computed after a time, as the prefills advance evenly."""
    tokens = 0.0
    for span in prefills:
        if span.end > sent:
            tokens += span.tokens * min(1.0, (span.end - sent) / (span.end - span.start or 1.0))
    return round(tokens)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are in at least one of the intervals."""
    total, last = 0.0, -inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


@dataclass(frozen=True, slots=True)
class Summary:
    """Holds the figures of a whole run.

    Attributes:
        end_to_end: seconds from the first request to the end of the last call.
        calls, failed: number of calls, and number of those that failed.
        first_token: median of the seconds from request to first token; ``None`` if no call had one.
        linked: number of calls that found their prompt streams, or are ``untold``.
        untold: number of calls whose links were used, but have no figures: the engine has no
            plugin, or the answer has no usage.
        no_gain: number of linked calls whose streams had computed nothing.
        overlap: the sum of these calls' overlaps; ``left`` is of those where it is known, and
            ``unlinked`` is known only if it is for all of these.
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
        return (
            f"{text}, instead of about {seconds(overlap.unlinked)}, by the engine's measured "
            "costs; not counted: what that took from answers being written"
        )


def summary(calls: Sequence[Call]) -> Summary:
    """Return the figures of a run, given its calls."""
    starts = [call.started.at for call in calls]
    ends = [call.ended.at for call in calls if call.ended is not None]
    waits = [call.first_token - call.started.at for call in calls if call.first_token is not None]
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
        ),
        untold=untold,
    )


def count_links(events: Sequence[Event]) -> dict[str, int]:
    """Return how many links have ended for each reason, and how many are ``still open``."""
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
"""The columns of a table of calls: tokens, but for the times ``ahead`` and ``first token``.

A prompt's tokens are ``cached`` or ``late``; ``streamed`` are those of the cached ones that its
link had computed (on an engine without the plugin: that it had asked for).
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
"""What the words in the column ``link`` mean: how the engine says that a call has found its stream
(``StreamUse.status``), or what became of a link of which the engine says nothing."""


def row(call: Call, overlap: Overlap | None) -> list[str]:
    """Return one cell for each of ``COLUMNS``; empty if the engine does not report the value."""
    usage = call.usage
    numbers = (
        (
            usage.prompt_tokens,
            usage.cached_tokens,
            call.plain_tokens if usage.streamed_tokens is None else usage.streamed_tokens,
            usage.late_tokens,
            usage.completion_tokens,
        )
        if usage is not None
        else (None,) * 5
    )
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
    waited = seconds(call.first_token - call.started.at) if call.first_token is not None else ""
    state = "failed" if isinstance(call.ended, CallFailed) else ""
    if call.ended is None:
        state = "not ended"
    return ", ".join(part for part in (waited, state) if part)


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
    """One remark; ``engine`` is empty if the event names none, as for an agent without a link."""

    at: float
    agent: str
    engine: str
    kind: NoteKind
    text: str


def notes(events: Sequence[Event]) -> list[Note]:
    """Return the notes of a run in the order of their times."""
    declined = {(event.agent, event.reason) for event in events if isinstance(event, LinkDeclined)}
    made = [_note_event(event) for event in events] + [
        _note_call(call)
        for call in calls(events)
        if (call.agent, call.started.unlinked) not in declined
    ]
    return sorted([note for note in made if note is not None], key=lambda note: note.at)


def _note_event(event: Event) -> Note | None:
    def note(kind: NoteKind, text: str) -> Note:
        return Note(event.at, event.agent, event.engine, kind, text)

    match event:
        case CallFailed():
            return note("failed", f"the call failed: {event.error}")
        case LinkDeclined():
            return note("declined", event.reason)
        case LinkWaits():
            return note(
                "waits", f"the text of {event.upstream} is not streamed to it: {event.reason}"
            )
        case UpstreamFailed():
            text = f"{event.upstream} failed ({event.failure}); action: {event.action}"
            return note("upstream failed", text)
        case LinkClosed(reason="mispredicted"):
            return note("mispredicted", "the conversation took another course; the link was closed")
        case LinkClosed() if event.reason not in ORDINARY_ENDS:
            return note("link failed", f"its link failed: {event.reason}")
        case LinkClosed() if event.reason not in ("used", "closed"):
            return note("ended", f"the link ended: {event.reason}")
        case _:
            return None


def _note_call(call: Call) -> Note | None:
    started, status = call.started, link_status(call)

    def note(kind: NoteKind, text: str) -> Note:
        return Note(started.at, call.agent, started.engine, kind, text)

    if status == "mispredicted":
        text = "its prompt differs from its stream; the engine computed the rest with the request"
        return note("mispredicted", text)
    if status == "no gain":
        return note("no gain", _why_no_gain(call))
    if status == "late":
        return note("late", LATE)
    return note("unlinked", started.unlinked) if status == "none" else None


def _why_no_gain(call: Call) -> str:
    usage = call.usage
    if usage is not None and usage.streamed_tokens:
        return "the engine began with its stream only when its request was sent"
    if usage is None or usage.late_tokens is None or usage.late_tokens > _MOST_LEFT_TOKENS:
        return "the engine had not begun with its stream when its request came"
    return f"too few tokens were new: an engine leaves up to {_MOST_LEFT_TOKENS} to the request"
