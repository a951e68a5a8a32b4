"""Note what failed in a run, or did not go as planned, and why (``notes``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flashmoa.observe.calls import Call, calls
from flashmoa.observe.events import (
    CallFailed,
    Event,
    LinkClosed,
    LinkDeclined,
    LinkWaits,
    UpstreamFailed,
)

NoteKind = Literal[
    "failed", "upstream failed", "mispredicted", "late", "declined", "waits", "ended"
]

# Reasons for which a link ends that need no note: its call used it, or its team was closed.
_ORDINARY_REASONS = ("used", "closed")


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
    made = [_note_event(event) for event in events] + [_note_call(call) for call in calls(events)]
    return sorted([note for note in made if note is not None], key=lambda note: note.at)


def _note_event(event: Event) -> Note | None:
    def note(kind: NoteKind, text: str) -> Note:
        return Note(event.at, event.agent, event.engine, kind, text)

    match event:
        case CallFailed():
            return note("failed", f"the call failed: {event.error}")
        case LinkDeclined():
            return note("declined", f"no link to it: {event.reason}")
        case LinkWaits():
            return note(
                "waits", f"the text of {event.upstream} is not streamed to it: {event.reason}"
            )
        case UpstreamFailed():
            text = f"{event.upstream} failed ({event.failure}); action: {event.action}"
            return note("upstream failed", text)
        case LinkClosed(reason="mispredicted"):
            return note("mispredicted", "the conversation took another course; the link was closed")
        case LinkClosed() if event.reason not in _ORDINARY_REASONS:
            return note("ended", f"the link ended: {event.reason}")
        case _:
            return None


def _note_call(call: Call) -> Note | None:
    started = call.started
    stream = call.usage.prompt_stream if call.usage is not None else None
    if stream is not None and stream.status == "mispredicted":
        text = "its prompt differs from its stream; the engine computed the rest with the request"
        return Note(started.at, call.agent, started.engine, "mispredicted", text)
    if started.late:
        text = "its request was sent before its prompt stream was open"
        return Note(started.at, call.agent, started.engine, "late", text)
    return None
