"""Everything that happens, as one stream of typed events.

Times are Unix seconds (``time.time()``), so that events of several processes on one machine
line up. Whoever wants to look (timeline, bench, a user's logger) passes a ``Listener``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flashmoa.engine import PromptUsage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """``agent`` and ``engine`` (its URL) say whose event it is."""

    agent: str
    engine: str
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent(Event):
    """Of one call of an agent; the events of a call have the same ``call_id``."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(CallEvent):
    """An agent's request goes out; ``stream_id`` if it uses a prompt stream.

    ``model``: as the request names it. ``late``: its link was still being made, so that it came
    before its stream.
    """

    model: str = ""
    stream_id: str | None = None
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(CallEvent):
    """The first text of an answer arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinished(CallEvent):
    """The answer is complete; ``text`` is empty where it is a tool call.

    ``finish_reason``: why it ended, as the client says it (``stop``, ``length``...).
    """

    text: str = ""
    usage: PromptUsage | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed(CallEvent):
    """The call raised ``error``, of the class ``error_type``, or was cancelled."""

    error: str
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpened(Event):
    """A future prompt of ``agent`` is being prefilled."""

    upstream: tuple[str, ...]
    stream_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAdvanced(Event):
    """More of it was sent: tokens that are certain, and that have their KV."""

    stream_id: str
    received_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWaits(Event):
    """The link to ``agent`` gets no text of ``upstream`` as it is written, and why."""

    upstream: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamFailed(Event):
    """The link to ``agent`` waits for ``upstream``, which failed (``error``, ``cancel``,
    ``timeout``, ``stall``); ``action`` is what its policy says."""

    upstream: str
    failure: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDeclined(Event):
    """There is no link to ``agent`` this time, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed(Event):
    """The link is over. ``reason``: ``used``, ``abort``, ``mispredicted``, ``unused``,
    ``closed``, or an error."""

    stream_id: str | None
    reason: str


Listener = Callable[[Event], None]


def contained(listener: Listener) -> Listener:
    """A listener whose exceptions are logged and go no further: watching changes nothing."""
    if listener is ignore:
        return ignore

    def listen(event: Event) -> None:
        try:
            listener(event)
        except Exception:
            logger.exception("A listener failed at %s", type(event).__name__)

    return listen


def both(one: Listener, other: Listener) -> Listener:
    """Two listeners as one."""

    def listen(event: Event) -> None:
        one(event)
        other(event)

    return listen


def ignore(_event: Event) -> None:
    """The listener of whoever does not want to know."""
