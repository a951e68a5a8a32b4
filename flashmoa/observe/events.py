"""Define the events that are reported during a run, and the listeners that receive them.

Times are Unix seconds (``time.time()``), so that events of several processes on one machine can be
compared. A ``Listener`` is any function of one event: a trace, OpenTelemetry, a user's logger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashmoa.engine import PromptUsage, StreamFigures

logger = logging.getLogger(__name__)

# Why a call has no link, where reports have a word of their own for it.
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
    """An event of one call; the events of a call have the same ``call_id``."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(CallEvent):
    """An agent's request is about to be sent; ``stream_id`` is set if it uses a link.

    ``model`` is the model name in the request. ``unlinked`` says why the request uses no link; it
    is empty if it uses one. ``late``: the request came before its stream was open, since its link
    was still being made.
    """

    model: str = ""
    stream_id: str | None = None
    late: bool = False
    unlinked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSent(CallEvent):
    """The prompt of a call's request, as it is sent; a ``repr`` does not show it.

    ``messages`` are OpenAI's, ``tools`` those that the model is shown, and ``settings`` the
    ``chat_template_kwargs``, the other fields that shape the prompt (see
    ``flashmoa.engine.prompt_fields``) and what its KV is shared within (see
    ``flashmoa.engine.kv_namespace``).
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

    ``finish_reason`` is the client's value (``stop``, ``length``...).
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
    """A future prompt of ``agent`` is being prefilled.

    ``plain``: its engine has no plugin, so it is prefilled in a few steps, and ``stream_id`` is an
    id that the client has made for the events of this link.
    """

    upstream: tuple[str, ...]
    stream_id: str
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAdvanced(Event):
    """More of a prompt was sent.

    ``received_tokens`` are certain; for ``prefilled_tokens`` the engine has computed the KV.
    """

    stream_id: str
    received_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWaits(Event):
    """The link to ``agent`` does not get the text of ``upstream`` as it is written."""

    upstream: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamFailed(Event):
    """The link to ``agent`` waits for ``upstream``, which failed.

    ``failure`` is ``error``, ``cancel``, ``timeout`` or ``stall``; ``action`` is what the failure
    policy says for it: ``abort`` or ``finalize``.
    """

    upstream: str
    failure: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDeclined(Event):
    """There is no link to ``agent``; ``engine`` may be empty.

    It is reported once for each agent and kind of reason, and each time that an engine, or its
    room, is the reason.
    """

    reason: str


# Reasons for a link to end although nothing has failed; any other reason is an error.
ORDINARY_ENDS = frozenset(
    {"used", "abort", "mispredicted", "unused", "closed", "too late", "plain engine", "unfinished"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed(Event):
    """The link has ended; ``reason`` is one of :data:`ORDINARY_ENDS`, or an error."""

    stream_id: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFound(Event):
    """A call behind a front end has ended: what its engine says of its prompt stream.

    ``figures`` is ``None`` if the request did not find the stream: it went to another engine, or
    had ended before its stream.
    """

    stream_id: str
    figures: StreamFigures | None


Listener = Callable[[Event], None]


def contained(listener: Listener) -> Listener:
    """Return a listener that logs the exceptions of another one instead of raising them."""
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
    """Do nothing: the listener of those who want no events."""
