"""Turn events into attributes and measurements of OpenTelemetry's GenAI semantic conventions.

Source: open-telemetry/semantic-conventions-genai, docs/gen-ai (spans, agent spans, metrics), all
of which is in development. Names that the conventions lack begin with ``flashmoa.``. OpenTelemetry
need not be installed for this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flashmoa.engine import PromptUsage
from flashmoa.observe.events import (
    CallEvent,
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    LinkAdvanced,
    LinkClosed,
    LinkDeclined,
    LinkOpened,
    LinkWaits,
    UpstreamFailed,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

Attributes = dict[str, str | bool | int | float | tuple[str, ...]]

OPERATION, AGENT, ERROR_TYPE = "gen_ai.operation.name", "gen_ai.agent.name", "error.type"
MODEL = "gen_ai.request.model"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
STREAM = "flashmoa.link.stream_id"
REASON = "flashmoa.link.reason"
# The conventions require a provider, list no inference engine, and allow any other name. Events do
# not say which engine it is.
_PROVIDER = {"gen_ai.provider.name": "self_hosted"}
UNKNOWN_ERROR = "_OTHER"
# Bucket boundaries that the conventions give for the histograms.
_SECONDS = [0.01 * 2**power for power in range(14)]
_TOKENS = [float(4**power) for power in range(14)]
_TOOL_CALLS = ("tool_calls", "function_calls")
# Reasons for which a link ends; any other one is an error.
_ORDINARY_ENDS = frozenset(
    {"used", "abort", "mispredicted", "unused", "closed", "too late", "plain engine"}
)


def call_attributes(call: CallStarted) -> Attributes:
    """Return the attributes that a model call's span and its measurements have in common."""
    return {OPERATION: "chat", **_PROVIDER, **_model(call), **_server(call.engine)}


def call_span_attributes(call: CallStarted) -> Attributes:
    """Return the attributes that only a model call's span has."""
    stream: Attributes = {STREAM: call.stream_id} if call.stream_id is not None else {}
    return {AGENT: call.agent, "flashmoa.link.late": call.late, **stream}


def agent_attributes(event: Event) -> Attributes:
    """Return the attributes of a span of an agent's turn."""
    model = _model(event) if isinstance(event, CallStarted) else {}
    return {OPERATION: "invoke_agent", **_PROVIDER, AGENT: event.agent, **model}


def is_agent_span(attributes: Mapping[str, object], name: str) -> bool:
    """Return whether these are the attributes of a span of that agent's turn."""
    return attributes.get(OPERATION) == "invoke_agent" and attributes.get(AGENT) == name


def answer_attributes(call: CallFinished, content: bool) -> Attributes:
    """Return the attributes that a call's span gets when the answer is complete.

    Args:
        content: whether to include the text of the answer.
    """
    attributes: Attributes = {} if call.usage is None else _usage_attributes(call.usage)
    if call.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (call.finish_reason,)
    if content and call.text:
        reason = "tool_call" if call.finish_reason in _TOOL_CALLS else call.finish_reason or ""
        parts = [{"type": "text", "content": call.text}]
        message = {"role": "assistant", "parts": parts, "finish_reason": reason}
        attributes["gen_ai.output.messages"] = json.dumps([message], ensure_ascii=False)
    return attributes


def error_type(call: CallFailed) -> str:
    """Return the value of ``error.type``."""
    return call.error_type or UNKNOWN_ERROR


def prompt_sources(usage: PromptUsage) -> dict[str, int]:
    """Return the number of a prompt's tokens by where their KV came from.

    ``streamed``: computed by the call's link before the call; ``cached``: in the cache for another
    reason; ``late``: computed when the call came.
    """
    if usage.cached_tokens is None:
        return {}
    streamed = usage.streamed_tokens or 0
    late = usage.prompt_tokens - usage.cached_tokens
    return {"streamed": streamed, "cached": usage.cached_tokens - streamed, "late": late}


def link_attributes(opened: LinkOpened) -> Attributes:
    """Return the attributes of a link's span."""
    return {
        AGENT: opened.agent,
        STREAM: opened.stream_id,
        "flashmoa.link.upstream": opened.upstream,
        **_server(opened.engine),
    }


def link_error(reason: str) -> str | None:
    """Return the class name of the error that a link ended with; ``None`` if it was no error."""
    return None if reason in _ORDINARY_ENDS else reason.partition(":")[0]


def span_event(event: Event) -> tuple[str, Attributes] | None:
    """Return the name and the attributes of the span event for an event of a link, if any."""
    match event:
        case LinkAdvanced():
            return "flashmoa.link.advanced", {
                "flashmoa.link.received_tokens": event.received_tokens,
                "flashmoa.link.prefilled_tokens": event.prefilled_tokens,
            }
        case LinkWaits():
            return "flashmoa.link.waits", {
                "flashmoa.link.upstream": event.upstream,
                REASON: event.reason,
            }
        case UpstreamFailed():
            return "flashmoa.upstream.failed", {
                "flashmoa.link.upstream": event.upstream,
                "flashmoa.upstream.failure": event.failure,
                "flashmoa.upstream.action": event.action,
            }
        case LinkDeclined():
            return "flashmoa.link.declined", {REASON: event.reason}
        case LinkClosed():
            return "flashmoa.link.closed", {REASON: event.reason}
        case _:
            return None


def _model(call: CallStarted) -> Attributes:
    return {MODEL: call.model} if call.model else {}


def _server(url: str) -> Attributes:
    where = urlsplit(url)
    if where.hostname is None:
        return {}
    port = where.port or (443 if where.scheme == "https" else 80)
    return {"server.address": where.hostname, "server.port": port}


def _usage_attributes(usage: PromptUsage) -> Attributes:
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


class Meters:
    """Measures calls, their tokens, and how links ended."""

    def __init__(self, meter: Meter) -> None:
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "GenAI operation duration.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._first_chunk = meter.create_histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "Time to receive the first chunk of a streamed answer.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self._prompt = meter.create_counter(
            "flashmoa.prompt.tokens",
            "{token}",
            "Prompt tokens, by where their KV came from: streamed, cached or late.",
        )
        self._links = meter.create_counter(
            "flashmoa.links", "{link}", "Links that have ended, by the reason."
        )

    def record_answer(
        self, call: CallStarted, first_token: float | None, event: CallFinished
    ) -> None:
        """Record an answered call; ``first_token`` in Unix seconds."""
        attributes = call_attributes(call)
        self._record_duration(call, event, attributes)
        if first_token is not None:
            self._first_chunk.record(first_token - call.at, attributes)
        if event.usage is not None:
            types = {"input": event.usage.prompt_tokens, "output": event.usage.completion_tokens}
            for kind, tokens in types.items():
                self._tokens.record(tokens, {**attributes, "gen_ai.token.type": kind})
            for source, tokens in prompt_sources(event.usage).items():
                self._prompt.add(tokens, {**attributes, "flashmoa.prompt.source": source})

    def record_failure(self, call: CallStarted, event: CallFailed) -> None:
        """Record a call that failed."""
        self._record_duration(call, event, {**call_attributes(call), ERROR_TYPE: error_type(event)})

    def record_link_end(self, event: LinkClosed) -> None:
        """Record how a link ended."""
        error = link_error(event.reason)
        self._links.add(1, {REASON: error or event.reason})

    def _record_duration(self, call: CallStarted, end: CallEvent, attributes: Attributes) -> None:
        self._duration.record(end.at - call.at, attributes)
