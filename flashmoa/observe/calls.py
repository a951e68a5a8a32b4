"""One call of an agent: telling of it, and finding it again among the events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
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
    Listener,
)


class CallReporter:
    """Tells a listener of one call, which may fail before its request goes out."""

    def __init__(self, listener: Listener, *, agent: str, engine: str, model: str) -> None:
        self._listener = listener
        self._model = model
        self._begun = False
        self._call = _Names(agent=agent, engine=engine, call_id=secrets.token_hex(8))

    def started(self, stream_id: str | None, *, late: bool) -> None:
        self._listener(CallStarted(**self._call, model=self._model, stream_id=stream_id, late=late))

    def text(self) -> None:
        """Some of the answer has arrived."""
        if not self._begun:
            self._begun = True
            self._listener(FirstToken(**self._call))

    def finished(self, text: str, usage: PromptUsage | None, finish_reason: str | None) -> None:
        self._listener(
            CallFinished(**self._call, text=text, usage=usage, finish_reason=finish_reason)
        )

    def failed(self, error: BaseException) -> None:
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
        return self.started.agent

    @property
    def finished(self) -> CallFinished | None:
        """``None`` where it failed, or goes on."""
        return self.ended if isinstance(self.ended, CallFinished) else None

    @property
    def usage(self) -> PromptUsage | None:
        return self.finished.usage if self.finished is not None else None


def calls(events: Iterable[Event]) -> list[Call]:
    """The calls among events, in the order in which they started."""
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
