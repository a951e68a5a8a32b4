"""Report one call (``CallReporter``), rebuild a run's calls from events (``calls``), and find whose
text streamed into which call (``handoffs``).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

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
    """Reports one call to a listener."""

    def __init__(self, listener: Listener, *, agent: str, engine: str, model: str) -> None:
        self._listener = listener
        self._model = model
        self._has_text = False
        self._call: dict[str, Any] = {
            "agent": agent,
            "engine": engine,
            "call_id": secrets.token_hex(8),
        }

    def started(self, stream_id: str | None, unlinked: str) -> None:
        """Report that the request is about to be sent; see :class:`CallStarted`."""
        event = CallStarted(
            **self._call,
            model=self._model,
            stream_id=stream_id,
            late=unlinked == LATE,
            unlinked=unlinked,
        )
        self._listener(event)

    def prompt_sent(self, body: Mapping[str, Any]) -> None:
        """Report the prompt of a chat completion with this body."""
        fields = prompt_fields(body)
        tools = list(fields.pop("tools", ()))
        if fields.get("tool_choice") == "none":
            tools = []  # SGLang does not show a model the tools that it must not call.
        settings = {**fields.pop("chat_template_kwargs", {}), **fields, **kv_namespace(body)}
        messages = list(body["messages"])
        self._listener(PromptSent(**self._call, messages=messages, tools=tools, settings=settings))

    def text_arrived(self) -> None:
        """Note that a piece of the answer has arrived, and report the first one."""
        if not self._has_text:
            self._has_text = True
            self._listener(FirstToken(**self._call))

    def finished(self, text: str, usage: PromptUsage | None, finish_reason: str | None) -> None:
        self._listener(
            CallFinished(**self._call, text=text, usage=usage, finish_reason=finish_reason)
        )

    def failed(self, error: BaseException) -> None:
        """Report that the call raised ``error``, or was cancelled before or after its request."""
        kind = type(error).__name__
        self._listener(CallFailed(**self._call, error=repr(error), error_type=kind))


@dataclass(slots=True)
class Call:
    """A call, as its events tell it; times are Unix seconds.

    Attributes:
        plain_tokens: number of prompt tokens that the link prefilled on an engine without the
            plugin; ``None`` if there was no such link.
        found: behind a front end, the engine's report about the prompt stream.
        link_end: why the link ended; ``None`` if it had no stream.
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
    def wait(self) -> float | None:
        """Seconds from the request to the first token, if there was one."""
        return None if self.first_token is None else self.first_token - self.started.at

    @property
    def finished(self) -> CallFinished | None:
        """The complete answer; ``None`` if the call failed or has not ended."""
        return self.ended if isinstance(self.ended, CallFinished) else None

    @property
    def usage(self) -> PromptUsage | None:
        usage = self.finished.usage if self.finished is not None else None
        if usage is None or self.found is None or self.found.figures is None:
            return usage
        return usage.model_copy(update=dict(self.found.figures))


def calls(events: Iterable[Event]) -> list[Call]:
    """Return the calls among events, in starting order.

    A call that failed before its request was sent has no ``CallStarted`` and is left out.
    """
    by_id: dict[str, Call] = {}
    by_stream: dict[str | None, Call] = {}
    plain_tokens: dict[str | None, int] = {}
    for event in events:
        match event:
            case LinkOpened(plain=True):
                plain_tokens[event.stream_id] = 0
            case LinkAdvanced() if event.stream_id in plain_tokens:
                plain_tokens[event.stream_id] = event.prefilled_tokens
            case CallStarted():
                call = Call(event, plain_tokens=plain_tokens.get(event.stream_id))
                by_id[event.call_id] = call
                if event.stream_id is not None:
                    by_stream[event.stream_id] = call
            case StreamFound() if event.stream_id in by_stream:
                by_stream[event.stream_id].found = event
            case LinkClosed() if event.stream_id in by_stream:
                by_stream[event.stream_id].link_end = event.reason
            case CallEvent() if event.call_id in by_id:
                _add(by_id[event.call_id], event)
            case _:
                pass
    return list(by_id.values())


def _add(call: Call, event: CallEvent) -> None:
    if isinstance(event, PromptSent):
        call.prompt = event
    elif isinstance(event, FirstToken):
        call.first_token = event.at
    elif isinstance(event, CallFinished | CallFailed):
        call.ended = event


@dataclass(frozen=True, slots=True)
class Handoff:
    """Text of the call ``writer`` (a ``call_id``) streamed in this time (Unix seconds)."""

    writer: str
    start: float
    end: float


def handoffs(events: Sequence[Event]) -> dict[str, list[Handoff]]:
    """Return the handoffs into each linked call, by the ``call_id`` of the reader.

    A link names its upstream agents in prompt order. For each agent, the writer is a call that was
    still writing when the link was opened, and had text before the reader was sent. If several
    calls fit, because runs at the same time have agents with the same name, the writer is the call
    that ended last before the reader was sent, or else the latest call.

    Text streams in prompt order. A handoff starts at the writer's first token or when the text
    before it is complete, whichever is later. It ends when the reader is sent, at the latest.
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
    # A prompt usually has complete texts.
    return max(done, key=_end, default=writing[-1] if writing else None)


def _end(call: Call) -> float:
    return call.ended.at if call.ended is not None else inf


def _sequential_handoffs(writers: Sequence[Call], sent: float) -> list[Handoff]:
    """Return the handoff of each writer, given the writers in prompt order.

    Args:
        sent: when the reader's request was sent.
    """
    complete = 0.0
    spans: list[Handoff] = []
    for call in writers:
        start = max(call.first_token or 0.0, complete)
        complete = max(start, min(_end(call), sent))
        spans.append(Handoff(call.started.call_id, start, complete))
    return spans
