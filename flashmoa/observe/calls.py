"""Report one call (``CallReporter``), reconstruct a run's calls from events (``calls``), and find
whose text flowed into which call (``handoffs``).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypedDict

from flashmoa.engine import PromptUsage, kv_namespace, prompt_fields
from flashmoa.observe.events import (
    LATE,
    CallEvent,
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkAdvanced,
    LinkClosed,
    LinkOpened,
    Listener,
    PromptSent,
    StreamFound,
)


class CallReporter:
    """Reports one call to a listener; the call may fail before its request is sent."""

    def __init__(self, listener: Listener, *, agent: str, engine: str, model: str) -> None:
        self._listener = listener
        self._model = model
        self._has_text = False
        self._call = _CallFields(agent=agent, engine=engine, call_id=secrets.token_hex(8))

    def started(self, stream_id: str | None, unlinked: str) -> None:
        """Report that the request is about to be sent; see :class:`CallStarted`."""
        self._listener(
            CallStarted(
                **self._call,
                model=self._model,
                stream_id=stream_id,
                late=unlinked == LATE,
                unlinked=unlinked,
            )
        )

    def prompt_sent(self, body: Mapping[str, Any]) -> None:
        """Report the prompt of the request, given the body of its chat completion."""
        fields = prompt_fields(body)
        tools = list(fields.pop("tools", ()))
        if fields.get("tool_choice") == "none":
            tools = []  # SGLang does not show a model the tools that it must not call.
        settings = {**fields.pop("chat_template_kwargs", {}), **fields, **kv_namespace(body)}
        messages = list(body["messages"])
        self._listener(PromptSent(**self._call, messages=messages, tools=tools, settings=settings))

    def text_arrived(self) -> None:
        """Report the first token; call it whenever a piece of the answer has arrived."""
        if not self._has_text:
            self._has_text = True
            self._listener(FirstToken(**self._call))

    def finished(self, text: str, usage: PromptUsage | None, finish_reason: str | None) -> None:
        self._listener(
            CallFinished(**self._call, text=text, usage=usage, finish_reason=finish_reason)
        )

    def failed(self, error: BaseException) -> None:
        """Report that the call raised ``error``, or was cancelled."""
        kind = type(error).__name__
        self._listener(CallFailed(**self._call, error=repr(error), error_type=kind))


class _CallFields(TypedDict):
    agent: str
    engine: str
    call_id: str


@dataclass(slots=True)
class Call:
    """Holds what the events say of one call; times in Unix seconds.

    Attributes:
        plain_tokens: number of tokens of its prompt that its link had prefilled on an engine
            without the plugin; ``None`` if there was no such link.
        found: behind a front end, what the engine says of its prompt stream.
        link_end: the reason for which its link ended; ``None`` if it had no stream.
    """

    started: CallStarted
    first_token: float | None = None
    ended: CallFinished | CallFailed | None = None
    prompt: PromptSent | None = None
    plain_tokens: int | None = None
    found: StreamFound | None = None
    link_end: str | None = None

    @property
    def agent(self) -> str:
        return self.started.agent

    @property
    def finished(self) -> CallFinished | None:
        """The complete answer; ``None`` if the call failed, or has not ended."""
        return self.ended if isinstance(self.ended, CallFinished) else None

    @property
    def usage(self) -> PromptUsage | None:
        usage = self.finished.usage if self.finished is not None else None
        if usage is None or self.found is None or self.found.figures is None:
            return usage
        return usage.model_copy(update=dict(self.found.figures))


def calls(events: Iterable[Event]) -> list[Call]:
    """Return the calls among events, in the order in which they started.

    A call without ``CallStarted``, which failed before its request was sent, is left out.
    """
    by_id: dict[str, Call] = {}
    plain: dict[str, int] = {}
    by_stream: dict[str, Call] = {}
    for event in events:
        if isinstance(event, LinkOpened) and event.plain:
            plain[event.stream_id] = 0
        elif isinstance(event, LinkAdvanced) and event.stream_id in plain:
            plain[event.stream_id] = event.prefilled_tokens
        elif isinstance(event, CallStarted):
            call = Call(event, plain_tokens=plain.get(event.stream_id or ""))
            by_id[event.call_id] = call
            if event.stream_id is not None:
                by_stream[event.stream_id] = call
        elif isinstance(event, StreamFound) and event.stream_id in by_stream:
            by_stream[event.stream_id].found = event
        elif isinstance(event, LinkClosed) and event.stream_id in by_stream:
            by_stream[event.stream_id].link_end = event.reason
        elif isinstance(event, CallEvent) and event.call_id in by_id:
            call = by_id[event.call_id]
            if isinstance(event, PromptSent):
                call.prompt = event
            elif isinstance(event, FirstToken):
                call.first_token = event.at
            elif isinstance(event, CallFinished | CallFailed):
                call.ended = event
    return list(by_id.values())


@dataclass(frozen=True, slots=True)
class Handoff:
    """A time, in Unix seconds, in which text of the call ``writer`` (a ``call_id``) flowed."""

    writer: str
    start: float
    end: float


def handoffs(events: Sequence[Event]) -> dict[str, list[Handoff]]:
    """Return the handoffs into each linked call, by its ``call_id``.

    For each agent named in the link (``upstream``, in the prompt's order) the writer is a call that
    had produced text before the reader was sent and was still writing when the link was opened: the
    one that ended last before the reader was sent, or if none did, the latest one. (Runs at the
    same time may have agents of the same names.) Text can only flow in prompt order: a span starts
    at the writer's first token, or when the text before it in the prompt is complete, whichever is
    later. It ends when the reader is sent, at the latest.
    """
    links = {event.stream_id: event for event in events if isinstance(event, LinkOpened)}
    by_agent: defaultdict[str, list[Call]] = defaultdict(list)
    readers = calls(events)
    for call in readers:
        by_agent[call.agent].append(call)
    result: dict[str, list[Handoff]] = {}
    for reader in readers:
        link = links.get(reader.started.stream_id or "")
        if link is None:
            continue
        names = dict.fromkeys(link.upstream)
        writers = [_find_writer(by_agent[name], link, reader) for name in names]
        result[reader.started.call_id] = _sequential_handoffs(
            [writer for writer in writers if writer is not None], reader.started.at
        )
    return result


def _find_writer(candidates: Sequence[Call], link: LinkOpened, reader: Call) -> Call | None:
    sent = reader.started.at
    writing = [
        call
        for call in candidates
        if call is not reader
        and call.first_token is not None
        and call.first_token <= sent
        and (call.ended is None or call.ended.at >= link.at)
    ]
    done = [call for call in writing if call.ended is not None and call.ended.at <= sent]
    # A prompt has whole texts, as a rule.
    return max(done, key=_end, default=writing[-1] if writing else None)


def _end(call: Call) -> float:
    return call.ended.at if call.ended is not None else inf


def _sequential_handoffs(writers: Sequence[Call], sent: float) -> list[Handoff]:
    """Return the span in which each writer's text flowed, given the writers in prompt order.

    Args:
        sent: when the reader's request was sent.
    """
    complete = 0.0
    spans: list[Handoff] = []
    for call in writers:
        start = max(call.first_token or 0.0, complete)
        end = min(_end(call), sent)
        complete = max(start, end)
        spans.append(Handoff(call.started.call_id, start, complete))
    return spans
