"""Make the events of a call, and calls of them; select events of a kind, and warnings."""

import logging
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from flashmoa.observe import CallFinished, CallStarted, Event, FirstToken, LinkClosed, LinkOpened
from flashmoa.observe.calls import Call, calls

T = TypeVar("T")


def answered(agent: str, at: float, token: float | None, end: float, **more: Any) -> list[Event]:
    """Return the events of a call, given more fields of its start.

    Args:
        token: when its first token came; ``None`` if its answer came as a whole.
        more: also ``text`` and ``usage`` of its end, ``engine``, and ``id_``, the call's id.
    """
    ended = {name: more.pop(name) for name in ("text", "usage") if name in more}
    engine, id_ = more.pop("engine", "http://e"), more.pop("id_", agent)
    who: dict[str, Any] = {"agent": agent, "engine": engine, "call_id": id_}
    first = [] if token is None else [FirstToken(**who, at=token)]
    return [CallStarted(**who, at=at, **more), *first, CallFinished(**who, at=end, **ended)]


def make_call(agent: str, at: float, token: float | None, end: float, **more: Any) -> Call:
    (call,) = calls(answered(agent, at, token, end, **more))
    return call


def opened(agent: str = "B", at: float = 0.0, stream_id: str = "s", **more: Any) -> LinkOpened:
    who = {"agent": agent, "engine": "http://e", "upstream": ("A",), **more}
    return LinkOpened(**who, at=at, stream_id=stream_id)


def closed(reason: str, at: float = 0.0, stream_id: str | None = "s", **more: Any) -> LinkClosed:
    who = {"agent": "B", "engine": "http://e", **more}
    return LinkClosed(**who, at=at, stream_id=stream_id, reason=reason)


def of_kind(events: Iterable[object], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
