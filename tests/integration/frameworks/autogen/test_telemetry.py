"""What real runs report to users' tools: OpenTelemetry and AutoGen's own events."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent
from autogen_core.models import UserMessage
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from flashmoa.autogen import EngineUsage, link
from flashmoa.engine.local import LocalEngine
from flashmoa.observe.calls import calls
from tests.integration.frameworks.autogen.runs import Client, connected, run_team
from tests.integration.frameworks.autogen.teams import agent
from tests.unit.observe.test_opentelemetry import Telemetry, parent, times

ASK = [UserMessage(content="Go.", source="user")]


def pair(clients: list[Client], guide: str, *, stream: bool = False) -> RoundRobinGroupChat:
    """Make a team of a planner and a writer, with a client each."""
    agents = [
        agent(client, name, system_message=f"{guide[:2000]}\n\n{name}", model_client_stream=stream)
        for name, client in zip(("planner", "writer"), clients, strict=True)
    ]
    return RoundRobinGroupChat(agents, max_turns=2)


def span_of(spans: list[ReadableSpan], agent: str, start: str) -> ReadableSpan:
    """Return an agent's only span whose name begins with ``start``."""
    (only,) = [
        span
        for span in spans
        if span.name.startswith(start) and (span.attributes or {}).get("gen_ai.agent.name") == agent
    ]
    return only


async def test_a_linked_team_has_spans_within_autogens(
    engine: LocalEngine, downstream: LocalEngine, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoGen makes the agents' spans; ours are within them."""
    telemetry = Telemetry()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", telemetry.tracers)
    async with connected(engine, downstream, max_tokens=64) as clients:
        team = pair(clients, guide)
        link(team, listener=telemetry.listener())
        await team.run(task="Go.")
    spans = list(telemetry.exporter.get_finished_spans())
    for name in ("planner", "writer"):
        turn, chat = span_of(spans, name, "invoke_agent "), span_of(spans, name, "chat tiny")
        assert turn.instrumentation_scope is not None
        assert turn.instrumentation_scope.name == "autogen-core"
        assert parent(chat) == turn.context.span_id
    chat, linked = span_of(spans, "writer", "chat tiny"), span_of(spans, "writer", "link ")
    assert chat.attributes is not None
    assert chat.attributes["flashmoa.link.status"] == "hit"
    assert parent(linked) == span_of(spans, "writer", "invoke_agent ").context.span_id
    assert linked.attributes is not None
    assert linked.attributes["flashmoa.link.reason"] == "used"
    assert times(linked)[0] <= times(chat)[0]
    ahead = [span for span in spans if parent(span) == linked.context.span_id]
    tokens = sum(int(str((x.attributes or {})["flashmoa.prefill.tokens"])) for x in ahead)
    assert tokens == chat.attributes["flashmoa.usage.streamed_tokens"] > 0
    first = telemetry.points("gen_ai.client.operation.time_to_first_chunk")
    assert sum(point.count for point in first) == 2
    sources = {
        point.attributes["flashmoa.prompt.source"]: point.value
        for point in telemetry.points("flashmoa.prompt.tokens")
    }
    assert sources["streamed"] >= tokens


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """Return a list of the events that AutoGen's clients log."""
    messages: list[Any] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.msg)

    logger, handler = logging.getLogger(EVENT_LOGGER_NAME), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.mark.parametrize("stream", [False, True])
async def test_autogens_log_events_have_streamed_tokens(
    engine: LocalEngine, downstream: LocalEngine, guide: str, logged: list[Any], stream: bool
) -> None:
    """The writer has an engine of its own. Streams there need not wait for decodes."""
    async with connected(engine, downstream, max_tokens=64) as clients:
        events = (await run_team(pair(clients, guide, stream=stream), "Go.")).events
    kind = LLMStreamEndEvent if stream else LLMCallEvent
    fields = [event.kwargs for event in logged if type(event) is kind]
    made = calls(events)
    assert len(fields) == len(made) == 2
    for data, call in zip(fields, made, strict=True):
        assert call.usage is not None
        assert data["cached_tokens"] == call.usage.cached_tokens
        assert data["streamed_tokens"] == call.usage.streamed_tokens
        assert data["late_tokens"] == call.usage.late_tokens
        assert str(call.agent) in data["agent_id"]
    writer = fields[1]
    assert writer["streamed_tokens"] > 0
    assert writer["prompt_tokens"] == writer["cached_tokens"] + writer["late_tokens"]


async def test_autogens_events_of_unlinked_calls_have_their_own_figures(
    model_client: Client, logged: list[Any]
) -> None:
    """Each of several overlapping calls has its own figures; a stock client's event has none."""
    client = model_client
    await client.create(ASK)  # A part of each later prompt is in the cache then.
    logged.clear()
    one, other = client.create_stream(ASK), client.create_stream(ASK * 2)
    await anext(one)
    await anext(other)
    wanted: list[Any] = [(await client.create(ASK)).usage]
    for stream in (one, other):
        wanted += [item.usage async for item in stream if not isinstance(item, str)]
    ends = [x.kwargs for x in logged if isinstance(x, LLMCallEvent | LLMStreamEndEvent)]
    assert len(ends) == 3
    for usage, data in zip(wanted, ends, strict=True):
        assert isinstance(usage, EngineUsage)
        assert data["prompt_tokens"] == usage.prompt_tokens
        assert data["cached_tokens"] == usage.cached_tokens
        assert data["late_tokens"] == usage.late_tokens
    logging.getLogger(EVENT_LOGGER_NAME).info(
        LLMCallEvent(messages=[], response={}, prompt_tokens=1, completion_tokens=1)
    )
    assert "cached_tokens" not in logged[-1].kwargs
