"""The calls of a run: reporting one, finding them among events, and whose text each one read."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from flashmoa.engine import PromptUsage
from flashmoa.observe.events import (
    CallEvent,
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkOpened,
    Listener,
)


class CallReporter:
    """Reports one call to a listener; the call may fail before its request goes out."""

    def __init__(self, listener: Listener, *, agent: str, engine: str, model: str) -> None:
        self._listener = listener
        self._model = model
        self._has_text = False
        self._call = _Names(agent=agent, engine=engine, call_id=secrets.token_hex(8))

    def started(self, stream_id: str | None, *, late: bool) -> None:
        """Report that the request goes out."""
        self._listener(CallStarted(**self._call, model=self._model, stream_id=stream_id, late=late))

    def text_arrived(self) -> None:
        """Report the first token; call it whenever a piece of the answer has arrived."""
        if not self._has_text:
            self._has_text = True
            self._listener(FirstToken(**self._call))

    def finished(self, text: str, usage: PromptUsage | None, finish_reason: str | None) -> None:
        """Report the complete answer."""
        self._listener(
            CallFinished(**self._call, text=text, usage=usage, finish_reason=finish_reason)
        )

    def failed(self, error: BaseException) -> None:
        """Report that the call raised ``error``, or was cancelled."""
        kind = type(error).__name__
        self._listener(CallFailed(**self._call, error=repr(error), error_type=kind))


class _Names(TypedDict):
    agent: str
    engine: str
    call_id: str


@dataclass(slots=True)
class Call:
    """What the events say of one call; times in Unix seconds."""

    started: CallStarted
    first_token: float | None = None
    ended: CallFinished | CallFailed | None = None

    @property
    def agent(self) -> str:
        """Whose call it is."""
        return self.started.agent

    @property
    def finished(self) -> CallFinished | None:
        """Its complete answer; ``None`` where it failed, or has not ended."""
        return self.ended if isinstance(self.ended, CallFinished) else None

    @property
    def usage(self) -> PromptUsage | None:
        """How its prompt was computed; ``None`` where that is not known."""
        return self.finished.usage if self.finished is not None else None


def calls(events: Iterable[Event]) -> list[Call]:
    """Return the calls among events, in the order in which they started."""
    found: dict[str, Call] = {}
    for event in events:
        if isinstance(event, CallStarted):
            found[event.call_id] = Call(event)
        elif isinstance(event, CallEvent) and event.call_id in found:
            call = found[event.call_id]
            if isinstance(event, FirstToken):
                call.first_token = event.at
            elif isinstance(event, CallFinished | CallFailed):
                call.ended = event
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Handoff:
    """A time, in Unix seconds, in which text of the call ``writer`` (a ``call_id``) flowed."""

    writer: str
    start: float
    end: float


def handoffs(events: Sequence[Event]) -> dict[str, list[Handoff]]:
    """Return the handoffs into each linked call, by its ``call_id``.

    A link names the agents whose text it gets, in the order of its prompt. The writer is the last
    call of such an agent that had begun to write before the linked call went out, and had not ended
    before the link was opened. Its text flows as it is written once all text before it is complete.
    """
    opened = {event.stream_id: event for event in events if isinstance(event, LinkOpened)}
    by_agent: defaultdict[str, list[Call]] = defaultdict(list)
    found = calls(events)
    for call in found:
        by_agent[call.agent].append(call)
    result: dict[str, list[Handoff]] = {}
    for call in found:
        link = opened.get(call.started.stream_id or "")
        if link is None:
            continue
        names = dict.fromkeys(link.upstream)
        writers = [_writer(by_agent[name], link, call) for name in names]
        result[call.started.call_id] = _in_turn([one for one in writers if one is not None])
    return result


def _writer(candidates: Sequence[Call], link: LinkOpened, reader: Call) -> Call | None:
    for call in reversed(candidates):
        token, ended = call.first_token, call.ended
        if token is None or call is reader or token > reader.started.at:
            continue
        if ended is None or ended.at >= link.at:
            return call
    return None


def _in_turn(writers: Sequence[Call]) -> list[Handoff]:
    complete = 0.0
    found: list[Handoff] = []
    for call in writers:
        start = max(call.first_token or 0.0, complete)
        end = call.ended.at if call.ended is not None else start
        complete = max(start, end)
        found.append(Handoff(call.started.call_id, start, complete))
    return found
