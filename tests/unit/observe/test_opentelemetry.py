"""Spans and metrics that are made from events."""

import sys
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flashmoa import observe
from flashmoa.engine import PromptUsage
from flashmoa.observe import opentelemetry
from flashmoa.observe.opentelemetry import OpenTelemetry

B = {"agent": "B", "engine": "http://b:30000"}
CALL = {**B, "call_id": "1"}
PREFILL = {"start": 1.0, "end": 2.5, "tokens": 500}
USAGE = PromptUsage.from_openai(
    {
        "prompt_tokens": 600,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 590, "streamed_tokens": 500, "late_tokens": 10},
        "prompt_stream": {"id": "s", "status": "hit", "prefills": [PREFILL]},
    }
)
STARTED = observe.CallStarted(**CALL, at=4.0, model="m", stream_id="s")
LINKED: list[observe.Event] = [
    observe.LinkOpened(**B, at=0.5, upstream=("A",), stream_id="s"),
    observe.LinkAdvanced(**B, at=2.5, stream_id="s", received_tokens=510, prefilled_tokens=500),
    STARTED,
    observe.LinkClosed(**B, at=4.25, stream_id="s", reason="used"),
    observe.FirstToken(**CALL, at=4.5),
    observe.CallFinished(**CALL, at=6.0, text="It rains.", usage=USAGE, finish_reason="stop"),
]


class Telemetry:
    """Records OpenTelemetry's spans and metrics in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def listener(self) -> OpenTelemetry:
        return OpenTelemetry(tracer_provider=self.tracers, meter_provider=self.meters)

    def report(self, *events: observe.Event) -> None:
        listener = self.listener()
        for event in events:
            listener(event)

    def spans(self) -> dict[str, ReadableSpan]:
        """Return the spans by name; each name occurs once."""
        spans = self.exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics if data is not None else []
        return [
            point for metric in metrics if metric.name == name for point in metric.data.data_points
        ]

    def sums(self, name: str, attribute: str) -> dict[str, float]:
        """Return a metric's sums, or its numbers, by an attribute."""
        return {
            each.attributes[attribute]: getattr(each, "sum", getattr(each, "value", None))
            for each in self.points(name)
        }


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def test_a_linked_call_has_four_spans(telemetry: Telemetry) -> None:
    telemetry.report(*LINKED)
    spans = telemetry.spans()
    assert list(spans) == ["link B", "prefill", "chat m", "invoke_agent B"]
    agent, chat, link, prefill = (
        spans[n] for n in ("invoke_agent B", "chat m", "link B", "prefill")
    )
    assert parent(agent) is None
    assert parent(chat) == parent(link) == agent.context.span_id
    assert parent(prefill) == link.context.span_id
    assert times(agent) == times(chat) == (4.0, 6.0)
    assert times(link) == (0.5, 4.25) and times(prefill) == (1.0, 2.5)
    assert chat.kind is trace.SpanKind.CLIENT and agent.kind is trace.SpanKind.INTERNAL
    assert attributes(chat) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "self_hosted",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.agent.name": "B",
        "gen_ai.usage.input_tokens": 600,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 590,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.response.finish_reasons": ("stop",),
        "server.address": "b",
        "server.port": 30000,
        "flashmoa.usage.cached_tokens": 590,
        "flashmoa.usage.streamed_tokens": 500,
        "flashmoa.usage.late_tokens": 10,
        "flashmoa.link.status": "hit",
        "flashmoa.link.stream_id": "s",
        "flashmoa.link.late": False,
    }
    assert attributes(link)["flashmoa.link.upstream"] == ("A",)
    assert attributes(link)["flashmoa.link.reason"] == "used"
    assert attributes(prefill) == {"flashmoa.prefill.tokens": 500}
    assert all(span.status.is_ok or span.status.is_unset for span in spans.values())


def test_a_call_without_a_link_says_why(telemetry: Telemetry) -> None:
    unlinked = replace(STARTED, stream_id=None, unlinked="its agent sleeps")
    telemetry.report(unlinked, observe.CallFinished(**CALL, at=6.0))
    chat = telemetry.spans()["chat m"]
    assert attributes(chat)["flashmoa.link.unlinked"] == "its agent sleeps"


def test_metrics_of_finished_calls(telemetry: Telemetry) -> None:
    # The last link never had a stream.
    closed = observe.LinkClosed(**B, stream_id=None, reason="too late")
    telemetry.report(*LINKED, closed)
    for name, expected in {
        ("gen_ai.client.operation.duration", "gen_ai.request.model"): {"m": 2.0},
        ("gen_ai.client.operation.time_to_first_chunk", "gen_ai.request.model"): {"m": 0.5},
        ("gen_ai.client.token.usage", "gen_ai.token.type"): {"input": 600, "output": 20},
        ("flashmoa.prompt.tokens", "flashmoa.prompt.source"): {
            "streamed": 500, "cached": 90, "late": 10,
        },
        ("flashmoa.links", "flashmoa.link.reason"): {"used": 1, "too late": 1},
    }.items():  # fmt: skip
        assert telemetry.sums(*name) == expected


def test_failed_call_ends_spans_with_error_type(telemetry: Telemetry) -> None:
    failed = observe.CallFailed(
        **CALL, at=5.0, error="TimeoutError('x')", error_type="TimeoutError"
    )
    gone = observe.LinkClosed(**B, at=4.5, stream_id="s", reason="EngineUnreachable: gone")
    telemetry.report(*LINKED[:3], gone, failed)
    for name in ("chat m", "invoke_agent B"):
        span = telemetry.spans()[name]
        assert span.status.status_code is trace.StatusCode.ERROR
        assert attributes(span)["error.type"] == "TimeoutError"
        assert times(span) == (4.0, 5.0)
    assert attributes(telemetry.spans()["link B"])["error.type"] == "EngineUnreachable"
    assert telemetry.sums("gen_ai.client.operation.duration", "error.type") == {"TimeoutError": 1.0}
    (links,) = telemetry.points("flashmoa.links")
    assert links.attributes == {"flashmoa.link.reason": "EngineUnreachable"}


def test_a_call_that_failed_before_its_request(telemetry: Telemetry) -> None:
    telemetry.report(observe.CallFailed(**CALL, at=5.0, error="x", error_type="Upstream"))
    (span,) = telemetry.spans().values()
    assert span.name == "invoke_agent B" and times(span) == (5.0, 5.0)
    assert attributes(span)["error.type"] == "Upstream"
    assert telemetry.points("gen_ai.client.operation.duration") == []


def test_calls_are_children_of_the_current_span(telemetry: Telemetry) -> None:
    """If that is a span of the agent, as AutoGen makes it, there is no second one."""
    tracer = telemetry.tracers.get_tracer("a framework")
    names = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "B"}
    listener = telemetry.listener()
    with tracer.start_as_current_span("its agent", attributes=names) as own:
        for event in LINKED[:3]:
            listener(event)
    for event in LINKED[3:]:
        listener(event)
    spans = telemetry.spans()
    assert "invoke_agent B" not in spans
    assert parent(spans["chat m"]) == parent(spans["link B"]) == own.get_span_context().span_id
    telemetry.exporter.clear()
    names["gen_ai.agent.name"] = "somebody else"
    with tracer.start_as_current_span("a supervisor", attributes=names) as other:
        telemetry.report(*LINKED)
    assert parent(telemetry.spans()["invoke_agent B"]) == other.get_span_context().span_id


def test_an_unused_link_has_its_openings_span(telemetry: Telemetry) -> None:
    listener = telemetry.listener()
    with telemetry.tracers.get_tracer("x").start_as_current_span("run") as run:
        for event in LINKED[:2]:
            listener(event)
    listener(observe.LinkClosed(**B, stream_id="s", reason="abort"))
    link = telemetry.spans()["link B"]
    assert parent(link) == run.get_span_context().span_id and link.status.is_unset


def test_the_oldest_unfinished_are_dropped(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opentelemetry, "MAX_REMEMBERED", 2)
    listener = telemetry.listener()
    for number in range(5):
        agent = {"agent": f"agent-{number}", "engine": "http://b"}
        listener(observe.LinkOpened(**agent, upstream=(), stream_id=f"s{number}"))
        listener(observe.CallStarted(**agent, call_id=f"{number}", model=f"m{number}"))
    assert {len(kept) for kept in (listener._calls, listener._links)} == {2}
    assert {f"chat m{n}" for n in range(3)} == {n for n in telemetry.spans() if "chat" in n}
    listener.close()
    assert len(telemetry.spans()) == 15
    assert {attributes(span)["error.type"] for span in telemetry.spans().values()} == {"_OTHER"}


def test_the_import_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "flashmoa.observe.opentelemetry")
    message = r"\.opentelemetry needs OpenTelemetry \(.*opentelemetry.*'flashmoa\[opentelemetry\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        import flashmoa.observe.opentelemetry  # noqa: F401
