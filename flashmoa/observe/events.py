"""Define the events of a run.

A ``Listener`` is any function that takes one event. Times are Unix seconds (``time.time()``), so
that events of several processes on one machine can be compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashmoa.engine import PromptUsage, StreamFigures

logger = logging.getLogger(__name__)

# Reasons for a call without a link; reports show a shorter word for each.
LATE = "its request was sent before its prompt stream was open"
FIRST = "it began the run, so that nothing was being written for it"
WHOLE = "no text in its prompt was being written when it was asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to ``agent`` on ``engine`` (its URL)."""

    agent: str
    engine: str
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent(Event):
    """An event of a call. All events of the same call have the same ``call_id``."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(CallEvent):
    """An agent's request is about to be sent.

    ``model`` is the model name in the request. ``stream_id`` is set if the request uses a link;
    otherwise ``unlinked`` says why not. ``late``: the request came while its link was still being
    made, before its stream was open.
    """

    model: str = ""
    stream_id: str | None = None
    late: bool = False
    unlinked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSent(CallEvent):
    """The prompt of a call's request; ``repr`` leaves it out.

    ``messages`` are OpenAI messages, ``tools`` the tools that the model sees. ``settings`` has the
    ``chat_template_kwargs``, the other fields that shape the prompt
    (``flashmoa.engine.prompt_fields``) and the KV namespace (``flashmoa.engine.kv_namespace``).
    """

    messages: list[dict[str, Any]] = field(repr=False)
    tools: list[Any] = field(default_factory=list[Any], repr=False)
    settings: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(CallEvent):
    """The first text of an answer arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinished(CallEvent):
    """The answer is complete; ``text`` is empty if it is a tool call.

    ``finish_reason`` is OpenAI's (``stop``, ``length``, ...).
    """

    text: str = ""
    usage: PromptUsage | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed(CallEvent):
    """The call raised ``error`` (of class ``error_type``), or was cancelled."""

    error: str
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpened(Event):
    """An engine prefills a future prompt of ``agent``.

    ``plain``: the engine has no plugin. It prefills the prompt in a few steps, and the client made
    up the ``stream_id``.
    """

    upstream: tuple[str, ...]
    stream_id: str
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAdvanced(Event):
    """The engine got more of a prompt.

    It has received ``received_tokens`` and computed the KV of ``prefilled_tokens``.
    """

    stream_id: str
    received_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWaits(Event):
    """The link to ``agent`` does not get the text of ``upstream`` while it is written."""

    upstream: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamFailed(Event):
    """The link to ``agent`` waits for ``upstream``, which failed.

    ``failure`` is ``error``, ``cancel``, ``timeout`` or ``stall``. The failure policy chose the
    ``action``: ``abort`` or ``finalize``.
    """

    upstream: str
    failure: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDeclined(Event):
    """There is no link to ``agent``; ``engine`` may be empty.

    A reason is reported once for each agent. If the engine or its room is the reason, it is
    reported each time.
    """

    reason: str


# Reasons for the end of a link that has not failed; any other reason is an error.
ORDINARY_ENDS = frozenset(
    {"used", "abort", "mispredicted", "unused", "closed", "too late", "plain engine", "unfinished"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed(Event):
    """The link has ended; ``reason`` is in :data:`ORDINARY_ENDS`, or is an error."""

    stream_id: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFound(Event):
    """A call behind a front end has ended, and its engine has told about its prompt stream.

    ``figures`` is ``None`` if the request did not find the stream: it went to another engine, or
    ended before its stream.
    """

    stream_id: str
    figures: StreamFigures | None


Listener = Callable[[Event], None]


def contained(listener: Listener) -> Listener:
    """Return a listener that calls ``listener`` and logs its exceptions."""
    if listener is ignore:
        return ignore

    def listen(event: Event) -> None:
        try:
            listener(event)
        except Exception:
            logger.exception(
                "A listener failed at the event %s; the run continues", type(event).__name__
            )

    return listen


def ignore(_event: Event) -> None:
    """Do nothing with an event (the default listener)."""
