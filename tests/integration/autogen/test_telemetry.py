"""What real runs report to users' tools: OpenTelemetry, AutoGen's own events, our listeners."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent
from autogen_core.models import UserMessage
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from flashmoa import Workflow
from flashmoa.autogen import EngineUsage, FlashMoAChatCompletionClient, link
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFailed, CallFinished, CallStarted, Event, PromptSent
from flashmoa.observe.calls import calls
from tests.integration.support import wait_until_idle
from tests.unit.observe.test_opentelemetry import Telemetry, parent, times

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient
ASK = [UserMessage(content="Go.", source="user")]


@pytest.fixture
async def clients(engine: LocalEngine) -> AsyncGenerator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**more: Any) -> Client:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "base_url": engine.url}
        ignore_eos = {"extra_body": {"ignore_eos": True}}
        made.append(Client(model="tiny", **ignore_eos, **settings | more))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def pair(
    client: Client, guide: str, *, writer: Client | None = None, stream: bool = False
) -> RoundRobinGroupChat:
    """Make a team of a planner and a writer, with the same client or one each."""
    agents = [
        AssistantAgent(
            name,
            model_client=client if name == "planner" else writer or client,
            system_message=f"{guide[:2000]}\n\nYou are {name}.",
            model_client_stream=stream,
        )
        for name in ("planner", "writer")
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
    clients: Callable[..., Client],
    downstream: LocalEngine,
    guide: str,
    telemetry: Telemetry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AutoGen makes the agents' spans; ours are within them."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", telemetry.tracers)
    client, writers = clients(max_tokens=64), clients(base_url=downstream.url)
    await writers.engine.flush_cache()
    team = pair(client, guide, writer=writers)
    link(team, listener=telemetry.listener())
    await team.run(task="Go.")
    await wait_until_idle(writers.engine)
    spans = list(telemetry.exporter.get_finished_spans())
    for agent in ("planner", "writer"):
        turn, chat = span_of(spans, agent, "invoke_agent "), span_of(spans, agent, "chat tiny")
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


async def test_a_workflow_has_spans_of_its_calls(
    client: EngineClient, guide: str, telemetry: Telemetry
) -> None:
    with telemetry.tracers.get_tracer("test").start_as_current_span("trip") as trip:
        async with Workflow(client, listener=telemetry.listener()) as flow:
            ask = {"role": "user", "content": f"{guide[:2000]} Plan."}
            more = {"model": "tiny", "ignore_eos": True, "temperature": 0}
            draft = flow.ask([ask], name="draft", max_tokens=24, **more)
            review = {"role": "user", "content": f"{guide[:1000]} Shorten: {draft}"}
            await flow.ask([review], name="review", max_tokens=4, **more)
    spans = list(telemetry.exporter.get_finished_spans())
    for agent in ("draft", "review"):
        turn, chat = span_of(spans, agent, "invoke_agent "), span_of(spans, agent, "chat tiny")
        assert parent(turn) == trip.get_span_context().span_id
        assert parent(chat) == turn.context.span_id
        assert chat.attributes is not None
        assert chat.attributes["gen_ai.response.finish_reasons"] == ("length",)
    linked = span_of(spans, "review", "link ")
    assert parent(linked) == span_of(spans, "review", "invoke_agent ").context.span_id
    assert (linked.attributes or {})["flashmoa.link.upstream"] == ("draft",)


async def test_a_failed_workflow_as_spans(client: EngineClient, telemetry: Telemetry) -> None:
    """The turn whose request was never sent has a span, too."""
    async with Workflow(client, listener=telemetry.listener()) as flow:
        ask = {"role": "user", "content": "Go."}
        broken = flow.ask([ask], name="broken", model="tiny", max_tokens=-1)
        reader = flow.ask([{"role": "user", "content": f"Read {broken}"}], name="reader")
        for answer in (broken, reader):
            with pytest.raises(Exception, match="must be at least 0"):
                await answer
    spans = list(telemetry.exporter.get_finished_spans())
    failed = [span_of(spans, "broken", n) for n in ("invoke_agent ", "chat ")]
    for span in [*failed, span_of(spans, "reader", "invoke_agent ")]:
        assert span.status.status_code is trace.StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "MalformedRequest"


async def test_an_answer_that_is_dropped_ends_its_spans(
    clients: Callable[..., Client], guide: str, telemetry: Telemetry
) -> None:
    """The reader of an answer's stream may stop before its end."""
    client = clients(max_tokens=2000, listener=telemetry.listener())
    stream = client.create_stream(ASK)
    await anext(stream)
    await stream.aclose()
    await wait_until_idle(client.engine)
    spans = list(telemetry.exporter.get_finished_spans())
    assert [span.name for span in spans] == ["chat tiny", "invoke_agent client"]
    assert (spans[0].attributes or {})["error.type"] == "GeneratorExit"


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
    clients: Callable[..., Client],
    downstream: LocalEngine,
    guide: str,
    logged: list[Any],
    stream: bool,
) -> None:
    """The writer has an engine of its own, in which streams need not wait for decodes."""
    client, writers = clients(max_tokens=64), clients(base_url=downstream.url)
    await writers.engine.flush_cache()
    team, events = pair(client, guide, writer=writers, stream=stream), list[Event]()
    link(team, listener=events.append)
    await team.run(task="Go.")
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
    clients: Callable[..., Client], logged: list[Any]
) -> None:
    """Each of several overlapping calls has its own figures; a stock client's event has none."""
    client = clients()
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


async def test_a_clients_listener_receives_failures(clients: Callable[..., Client]) -> None:
    events: list[Event] = []
    with pytest.raises(Exception, match="must be at least 0"):
        await clients(listener=events.append, max_tokens=-1).create(ASK)
    assert [type(event) for event in events] == [CallStarted, PromptSent, CallFailed]


@pytest.mark.parametrize("auto_link", [False, True])
async def test_a_teams_calls_are_reported_once(
    clients: Callable[..., Client], guide: str, auto_link: bool
) -> None:
    """They are reported to the team's listener, or to the client's if the team is not linked."""
    events: list[Event] = []
    client = clients(listener=events.append, auto_link=auto_link)
    await pair(client, guide).run(task="Go.")
    reported = [event for event in events if isinstance(event, CallStarted | CallFinished)]
    assert [event.agent for event in reported] == ["planner", "planner", "writer", "writer"]
    events.clear()
    team, others = pair(client, guide), list[Event]()
    link(team, listener=others.append)
    await team.run(task="Go.")
    assert not [event for event in events if isinstance(event, CallStarted)]
    assert len(calls(others)) == 2
