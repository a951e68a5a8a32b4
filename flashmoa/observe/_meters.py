"""The metrics of calls and links; needs OpenTelemetry."""

from __future__ import annotations

from opentelemetry.metrics import Meter

from flashmoa.observe import _genai
from flashmoa.observe.events import CallEvent, CallFailed, CallFinished, CallStarted, LinkClosed

# What the conventions say the histograms are to be made with.
_SECONDS = [0.01 * 2**power for power in range(14)]
_TOKENS = [float(4**power) for power in range(14)]


class Meters:
    """What is measured: calls, their tokens, and how links ended."""

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
            "flashmoa.linking.link", "{link}", "Links that are over, by why they ended."
        )

    def finished(self, call: CallStarted, first_token: float | None, event: CallFinished) -> None:
        of = _genai.request(call)
        self._took(call, event, of)
        if first_token is not None:
            self._first_chunk.record(first_token - call.at, of)
        if event.usage is not None:
            types = {"input": event.usage.prompt_tokens, "output": event.usage.completion_tokens}
            for kind, tokens in types.items():
                self._tokens.record(tokens, {**of, "gen_ai.token.type": kind})
            for source, tokens in _genai.prompt_sources(event.usage).items():
                self._prompt.add(tokens, {**of, "flashmoa.prompt.source": source})

    def failed(self, call: CallStarted, event: CallFailed) -> None:
        kind = _genai.error_type(event)
        self._took(call, event, {**_genai.request(call), _genai.ERROR_TYPE: kind})

    def link_over(self, event: LinkClosed) -> None:
        error = _genai.link_error(event.reason)
        self._links.add(1, {_genai.REASON: error or event.reason})

    def _took(self, call: CallStarted, end: CallEvent, of: _genai.Attributes) -> None:
        self._duration.record(end.at - call.at, of)
