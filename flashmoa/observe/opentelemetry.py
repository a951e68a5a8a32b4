"""Turn a run into OpenTelemetry spans and metrics, named by its GenAI semantic conventions.

Source: open-telemetry/semantic-conventions-genai, docs/gen-ai (spans, agent spans, metrics; all in
development). Names that the conventions lack begin with ``flashmoa.``.

Each call has a span ``chat {model}`` inside ``invoke_agent {agent}``. The latter is made unless the
current span is one already (AutoGen makes its own). It also has a span ``link {agent}`` for each
prompt stream, with a ``prefill`` for each piece that the engine computed ahead.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flashmoa._extras import from_extra
from flashmoa._limits import MAX_REMEMBERED
from flashmoa.engine import PromptUsage
from flashmoa.observe.events import (
    ORDINARY_ENDS,
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkClosed,
    LinkOpened,
)

with from_extra("opentelemetry", __name__, "OpenTelemetry"):
    from opentelemetry import context, metrics, trace

_Attributes = dict[str, str | bool | int | float | tuple[str, ...]]

_OPERATION, _AGENT, _ERROR_TYPE = "gen_ai.operation.name", "gen_ai.agent.name", "error.type"
_STREAM, _REASON = "flashmoa.link.stream_id", "flashmoa.link.reason"
# The conventions require a provider. They list no inference engine, and allow any other name;
# events do not tell the engine's.
_PROVIDER = {"gen_ai.provider.name": "self_hosted"}
_UNKNOWN_ERROR = "_OTHER"
# Bucket boundaries that the conventions give for the histograms.
_SECONDS = [0.01 * 2**power for power in range(14)]
_TOKENS = [float(4**power) for power in range(14)]


@dataclass(slots=True)
class _Call:
    """A call; ``spans`` are the chat's and, if this module made one, the agent's around it."""

    started: CallStarted
    spans: list[trace.Span]
    link: _Link | None
    first_token: float | None = None


@dataclass(slots=True)
class _Link:
    """A link; ``context`` was the current context when it was opened.

    Its ``span`` is a child of the agent's span of the call that uses the link. A link that no call
    uses gets its span at its end, as a child of the span that was current when it was opened.
    """

    opened: LinkOpened
    context: context.Context
    span: trace.Span | None = None


class OpenTelemetry:
    """Turns events into spans and metrics (a ``Listener``).

    Args:
        tracer_provider: makes the spans; by default the global one.
        meter_provider: makes the metrics; by default the global one.

    Spans have no prompts and no answers. A call's span is a child of the span that is current where
    the agent calls. It ends when the call is answered or fails; :meth:`close` ends the spans of
    abandoned calls.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("flashmoa", tracer_provider=tracer_provider)
        self._meters = _Meters(metrics.get_meter("flashmoa", meter_provider=meter_provider))
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._links: OrderedDict[str, _Link] = OrderedDict()

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
                self._abandon_oldest(MAX_REMEMBERED)
            case LinkClosed():
                self._close_link(event)
            case _:
                pass

    def close(self) -> None:
        """End the spans of calls and links that have not ended."""
        self._abandon_oldest(0)

    def _start(self, event: CallStarted) -> None:
        around, spans = context.get_current(), list[trace.Span]()
        if not _is_current_agent(event.agent):
            spans.append(self._agent_span(event))
            around = trace.set_span_in_context(spans[0], around)
        attributes = _call_attributes(event)
        attributes |= {_AGENT: event.agent, "flashmoa.link.late": event.late}
        if event.unlinked:
            attributes["flashmoa.link.unlinked"] = event.unlinked
        link: _Link | None = None
        if event.stream_id is not None:
            attributes[_STREAM] = event.stream_id
            link = self._links.get(event.stream_id)
        name, kind = f"chat {event.model}".rstrip(), trace.SpanKind.CLIENT
        chat = self._span(name, around, event.at, attributes, kind)
        if link is not None:
            self._link_span(link, around)
        self._calls[event.call_id] = _Call(event, [chat, *spans], link)
        self._abandon_oldest(MAX_REMEMBERED)

    def _first_token(self, event: FirstToken) -> None:
        call = self._calls.get(event.call_id)
        if call is not None:
            call.first_token = event.at
            chat, seconds = call.spans[0], event.at - call.started.at
            chat.set_attribute("gen_ai.request.stream", True)
            chat.set_attribute("gen_ai.response.time_to_first_chunk", seconds)
            chat.add_event("flashmoa.first_token", timestamp=_nanoseconds(event.at))

    def _finish(self, event: CallFinished) -> None:
        call = self._calls.pop(event.call_id, None)
        if call is None:
            return
        chat = call.spans[0]
        if event.usage is not None:
            chat.set_attributes(_usage_attributes(event.usage))
        if event.finish_reason is not None:
            chat.set_attribute("gen_ai.response.finish_reasons", (event.finish_reason,))
        if event.usage is not None and event.usage.prompt_stream is not None:
            link_span = call.link.span if call.link is not None else None
            around = trace.set_span_in_context(link_span or chat)
            for prefill in event.usage.prompt_stream.prefills:
                tokens: _Attributes = {"flashmoa.prefill.tokens": prefill.tokens}
                _end(self._span("prefill", around, prefill.start, tokens), prefill.end)
        for span in call.spans:
            _end(span, event.at)
        self._meters.record_answer(call.started, call.first_token, event)

    def _fail(self, event: CallFailed) -> None:
        call = self._calls.pop(event.call_id, None)
        if call is not None:
            spans = call.spans
            self._meters.record_failure(call.started, event)
        else:  # A text that the call was to read failed, so that no request was sent.
            spans = [] if _is_current_agent(event.agent) else [self._agent_span(event)]
        for span in spans:
            _end(span, event.at, event.error_type or _UNKNOWN_ERROR, event.error)

    def _close_link(self, event: LinkClosed) -> None:
        self._meters.record_link_end(event)
        link = self._links.pop(event.stream_id or "", None)
        if link is not None:
            span = self._link_span(link, link.context)
            span.set_attribute(_REASON, event.reason)
            _end(span, event.at, _link_error(event.reason), event.reason)

    def _abandon_oldest(self, limit: int) -> None:
        """Keep at most ``limit`` calls and links, and end the spans of older ones.

        Some have no end: their program has left them, or ended without them.
        """
        for kept in (self._calls, self._links):
            while len(kept) > limit:
                _, oldest = kept.popitem(last=False)
                is_link = isinstance(oldest, _Link)
                spans = [self._link_span(oldest, oldest.context)] if is_link else oldest.spans
                for span in spans:
                    _end(span, time.time(), _UNKNOWN_ERROR, "no further events arrived for it")

    def _link_span(self, link: _Link, around: context.Context) -> trace.Span:
        """Return the link's span, which is made in ``around`` if there is none."""
        if link.span is None:
            opened = link.opened
            attributes: _Attributes = {
                _AGENT: opened.agent,
                _STREAM: opened.stream_id,
                "flashmoa.link.upstream": opened.upstream,
                **_server(opened.engine),
            }
            link.span = self._span(f"link {opened.agent}", around, opened.at, attributes)
        return link.span

    def _agent_span(self, event: Event) -> trace.Span:
        model = _model(event) if isinstance(event, CallStarted) else {}
        attributes = {_OPERATION: "invoke_agent", **_PROVIDER, _AGENT: event.agent, **model}
        name = f"invoke_agent {event.agent}"
        return self._span(name, context.get_current(), event.at, attributes)

    def _span(
        self,
        name: str,
        around: context.Context,
        at: float,
        attributes: _Attributes,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> trace.Span:
        return self._tracer.start_span(
            name, around, kind=kind, attributes=attributes, start_time=_nanoseconds(at)
        )


def _is_current_agent(name: str) -> bool:
    """Return whether the current span is this agent's turn, as AutoGen makes it."""
    attributes: Any = getattr(trace.get_current_span(), "attributes", None) or {}
    return attributes.get(_OPERATION) == "invoke_agent" and attributes.get(_AGENT) == name


def _end(span: trace.Span, at: float, error: str | None = None, description: str = "") -> None:
    """End a span; ``error`` is the class name of its error, if it had one."""
    if error is not None:
        span.set_attribute(_ERROR_TYPE, error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, description))
    span.end(_nanoseconds(at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _call_attributes(call: CallStarted) -> _Attributes:
    return {_OPERATION: "chat", **_PROVIDER, **_model(call), **_server(call.engine)}


def _prompt_sources(usage: PromptUsage) -> dict[str, int]:
    """Return the number of a prompt's tokens by the source of their KV.

    ``streamed``: the call's link computed it before the call; ``cached``: it was in the cache for
    another reason; ``late``: it was computed when the call came.
    """
    if usage.cached_tokens is None:
        return {}
    streamed = usage.streamed_tokens or 0
    late = usage.prompt_tokens - usage.cached_tokens
    return {"streamed": streamed, "cached": usage.cached_tokens - streamed, "late": late}


def _link_error(reason: str) -> str | None:
    """Return the class name of the error that ended a link; ``None`` if it was no error."""
    return None if reason in ORDINARY_ENDS else reason.partition(":")[0]


def _model(call: CallStarted) -> _Attributes:
    return {"gen_ai.request.model": call.model} if call.model else {}


def _server(url: str) -> _Attributes:
    where = urlsplit(url)
    if where.hostname is None:
        return {}
    port = where.port or (443 if where.scheme == "https" else 80)
    return {"server.address": where.hostname, "server.port": port}


def _usage_attributes(usage: PromptUsage) -> _Attributes:
    values: dict[str, int | str | None] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "flashmoa.usage.cached_tokens": usage.cached_tokens,
        "flashmoa.usage.streamed_tokens": usage.streamed_tokens,
        "flashmoa.usage.late_tokens": usage.late_tokens,
        "flashmoa.link.status": usage.prompt_stream.status if usage.prompt_stream else None,
    }
    return {name: value for name, value in values.items() if value is not None}


class _Meters:
    """Measures calls, their tokens, and how links ended."""

    def __init__(self, meter: metrics.Meter) -> None:
        def histogram(name: str, unit: str, text: str, bounds: list[float]) -> metrics.Histogram:
            return meter.create_histogram(
                f"gen_ai.client.{name}", unit, text, explicit_bucket_boundaries_advisory=bounds
            )

        text = "GenAI operation duration."
        self._duration = histogram("operation.duration", "s", text, _SECONDS)
        text = "Time to receive the first chunk of a streamed answer."
        self._first_chunk = histogram("operation.time_to_first_chunk", "s", text, _SECONDS)
        text = "Number of input and output tokens used."
        self._tokens = histogram("token.usage", "{token}", text, _TOKENS)
        text = "Prompt tokens, by where their KV came from: streamed, cached or late."
        self._prompt = meter.create_counter("flashmoa.prompt.tokens", "{token}", text)
        text = "Links that have ended, by the reason."
        self._links = meter.create_counter("flashmoa.links", "{link}", text)

    def record_answer(
        self, call: CallStarted, first_token: float | None, event: CallFinished
    ) -> None:
        attributes = _call_attributes(call)
        self._duration.record(event.at - call.at, attributes)
        if first_token is not None:
            self._first_chunk.record(first_token - call.at, attributes)
        if event.usage is not None:
            types = {"input": event.usage.prompt_tokens, "output": event.usage.completion_tokens}
            for kind, tokens in types.items():
                self._tokens.record(tokens, {**attributes, "gen_ai.token.type": kind})
            for source, tokens in _prompt_sources(event.usage).items():
                self._prompt.add(tokens, {**attributes, "flashmoa.prompt.source": source})

    def record_failure(self, call: CallStarted, event: CallFailed) -> None:
        kind = event.error_type or _UNKNOWN_ERROR
        self._duration.record(event.at - call.at, {**_call_attributes(call), _ERROR_TYPE: kind})

    def record_link_end(self, event: LinkClosed) -> None:
        self._links.add(1, {_REASON: _link_error(event.reason) or event.reason})
