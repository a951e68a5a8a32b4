"""A run as OpenTelemetry spans and metrics, in the names of its GenAI semantic conventions.

Spans: ``invoke_agent {agent}``, where the current span is not that already (AutoGen makes its
own), around ``chat {model}``; beside that, for each prompt stream, ``link {agent}`` from its
opening to its end, with one ``prefill`` per piece that the engine computed ahead.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from flashmoa.observe import _genai
from flashmoa.observe.events import (
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkClosed,
    LinkOpened,
)

try:
    from opentelemetry import context, metrics, trace
except ImportError as missing:
    raise ImportError(
        "OpenTelemetry is not installed; pip install 'flashmoa[opentelemetry]'"
    ) from missing

# How many calls, links and agents without further events are kept; the oldest go first.
_KEPT = 1024
_HAPPENINGS = 128
_FORGOTTEN = "nothing more was heard of it"
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class _Call:
    started: CallStarted
    # The chat's, and outside it the agent's where there was none.
    spans: list[trace.Span]
    link: _Link | None
    first_token: float | None = None


@dataclass(slots=True)
class _Link:
    """``span`` is made once its parent is known: its call's, or the one in which it was opened."""

    opened: LinkOpened
    context: context.Context
    happenings: deque[Event] = field(default_factory=lambda: deque[Event](maxlen=_HAPPENINGS))
    span: trace.Span | None = None


class OpenTelemetry:
    """Makes spans and metrics of events (a ``Listener``).

    Args:
        tracer_provider: by default the global one.
        meter_provider: by default the global one.
        content: whether spans hold what agents answered (they never hold prompts); by default what
            OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT of the environment says.

    Spans are children of the span that is current where an agent calls. Each ends with its call,
    however that ends; :meth:`close` ends those of calls that were abandoned.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        content: bool | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("flashmoa", tracer_provider=tracer_provider)
        self._meters = _genai.Meters(metrics.get_meter("flashmoa", meter_provider=meter_provider))
        wanted = os.environ.get(_CONTENT, "").lower() in ("true", "span_only", "span_and_event")
        self._content = wanted if content is None else content
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._links: OrderedDict[str, _Link] = OrderedDict()
        # Events about an agent's links while it had none; its next call shows them.
        self._loose: OrderedDict[str, deque[Event]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        match event:
            case CallStarted():
                self._start(event)
            case FirstToken():
                self._first_token(event)
            case CallFinished():
                self._finish(event)
            case CallFailed():
                self._fail(event)
            case LinkOpened():
                self._links[event.stream_id] = _Link(event, context.get_current())
                _drop_oldest(self._links, self._give_up_link)
            case LinkClosed(stream_id=str(stream)) if stream in self._links:
                self._close_link(self._links.pop(stream), event)
            case _:
                self._happen(event)

    def close(self) -> None:
        """End the spans of calls and links that have not ended."""
        while self._calls:
            self._give_up_call(self._calls.popitem()[1])
        while self._links:
            self._give_up_link(self._links.popitem()[1])

    def _start(self, event: CallStarted) -> None:
        around, spans = context.get_current(), list[trace.Span]()
        if not _is_current_agent(event.agent):
            name = f"invoke_agent {event.agent}"
            spans.append(self._span(name, around, event.at, _genai.agent(event)))
            around = trace.set_span_in_context(spans[0], around)
        chat = self._span(
            f"chat {event.model}".rstrip(),
            around,
            event.at,
            _genai.request(event) | _genai.own_request(event),
            kind=trace.SpanKind.CLIENT,
        )
        _add_events(chat, self._loose.pop(event.agent, ()))
        link = self._links.get(event.stream_id) if event.stream_id is not None else None
        if link is not None:
            self._show_link(link, around)
        self._calls[event.call_id] = _Call(event, [chat, *spans], link)
        _drop_oldest(self._calls, self._give_up_call)

    def _first_token(self, event: FirstToken) -> None:
        call = self._calls.get(event.call_id)
        if call is not None:
            call.first_token = event.at
            call.spans[0].set_attribute("gen_ai.request.stream", True)
            seconds = event.at - call.started.at
            call.spans[0].set_attribute(_genai.FIRST_CHUNK, seconds)
            call.spans[0].add_event("flashmoa.first_token", timestamp=_nanoseconds(event.at))

    def _finish(self, event: CallFinished) -> None:
        call = self._calls.pop(event.call_id, None)
        if call is None:
            return
        call.spans[0].set_attributes(_genai.answer(event, self._content))
        if event.usage is not None and event.usage.prompt_stream is not None:
            ahead = call.link.span if call.link is not None else None
            for prefill in event.usage.prompt_stream.prefills:
                inside = trace.set_span_in_context(ahead or call.spans[0])
                tokens: _genai.Attributes = {"flashmoa.prefill.tokens": prefill.tokens}
                span = self._span("prefill", inside, prefill.start, tokens)
                span.end(_nanoseconds(prefill.end))
        for span in call.spans:
            span.end(_nanoseconds(event.at))
        self._meters.finished(call.started, call.first_token, event)

    def _fail(self, event: CallFailed) -> None:
        call = self._calls.pop(event.call_id, None)
        if call is None:  # A text that it was to read failed: no request went out.
            if _is_current_agent(event.agent):
                return
            name, around = f"invoke_agent {event.agent}", context.get_current()
            spans = [self._span(name, around, event.at, _genai.agent(event))]
        else:
            spans = call.spans
            self._meters.failed(call.started, event)
        for span in spans:
            _end_with_error(span, event.at, event.error, _genai.error_type(event))

    def _happen(self, event: Event) -> None:
        """Add an event to the link it is about, or keep it for the agent's next call."""
        link = self._link_of(event)
        if isinstance(event, LinkClosed):  # Of one that never had a stream.
            self._meters.link_over(event)
            link = None
        if link is None:
            loose = deque[Event](maxlen=_HAPPENINGS)
            self._loose.setdefault(event.agent, loose).append(event)
            _drop_oldest(self._loose, lambda _: None)
        elif link.span is not None:
            _add_events(link.span, [event])
        else:
            link.happenings.append(event)

    def _link_of(self, event: Event) -> _Link | None:
        """Find an event's link by its stream, else take the newest one to that agent."""
        stream: str | None = getattr(event, "stream_id", None)
        if stream is not None:
            return self._links.get(stream)
        links = reversed(self._links.values())
        return next((link for link in links if link.opened.agent == event.agent), None)

    def _close_link(self, link: _Link, event: LinkClosed) -> None:
        self._meters.link_over(event)
        span = self._show_link(link, link.context)
        span.set_attribute(_genai.REASON, event.reason)
        error = _genai.link_error(event.reason)
        if error is None:
            span.end(_nanoseconds(event.at))
        else:
            _end_with_error(span, event.at, event.reason, error)

    def _show_link(self, link: _Link, around: context.Context) -> trace.Span:
        if link.span is None:
            opened = link.opened
            link.span = self._span(f"link {opened.agent}", around, opened.at, _genai.link(opened))
            _add_events(link.span, link.happenings)
        return link.span

    def _give_up_call(self, call: _Call) -> None:
        for span in call.spans:
            _end_with_error(span, time.time(), _FORGOTTEN, _genai.UNKNOWN_ERROR)

    def _give_up_link(self, link: _Link) -> None:
        span = self._show_link(link, link.context)
        _end_with_error(span, time.time(), _FORGOTTEN, _genai.UNKNOWN_ERROR)

    def _span(
        self,
        name: str,
        around: context.Context,
        at: float,
        attributes: _genai.Attributes,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> trace.Span:
        return self._tracer.start_span(
            name, around, kind=kind, attributes=attributes, start_time=_nanoseconds(at)
        )


def _is_current_agent(name: str) -> bool:
    """Return whether the current span is one of that agent's turn, as AutoGen makes them."""
    attributes = getattr(trace.get_current_span(), "attributes", None)
    return attributes is not None and _genai.is_agent(attributes, name)


def _end_with_error(span: trace.Span, at: float, said: str, kind: str) -> None:
    span.set_attribute(_genai.ERROR_TYPE, kind)
    span.set_status(trace.Status(trace.StatusCode.ERROR, said))
    span.end(_nanoseconds(at))


def _add_events(span: trace.Span, events: Iterable[Event]) -> None:
    for event in events:
        happening = _genai.happening(event)
        if happening is not None:
            name, attributes = happening
            span.add_event(name, attributes, _nanoseconds(event.at))


def _drop_oldest(kept: OrderedDict[_Key, _Value], end: Callable[[_Value], None]) -> None:
    while len(kept) > _KEPT:
        end(kept.popitem(last=False)[1])


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
