"""Test ``link(workflow)`` on real engines: same answers, and B's prompt computed while A writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from agent_framework import Agent, AgentExecutorResponse, AgentResponseUpdate, Message, Workflow
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import ConcurrentBuilder, SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import (
    CallFailed,
    CallFinished,
    Event,
    LinkClosed,
    LinkDeclined,
    LinkOpened,
    LinkWaits,
)
from flashmoa.observe.calls import calls
from flashmoa.observe.trace import read
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Pair = tuple[FlashMoAChatClient, FlashMoAChatClient]
TASK = "Plan a trip to Nepal."


def options(tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True},
        **more,
    }


@pytest.fixture
async def clients(
    engine: LocalEngine,
    downstream: LocalEngine,
    client: EngineClient,
    downstream_client: EngineClient,
) -> AsyncGenerator[Pair]:
    async with (
        FlashMoAChatClient("tiny", base_url=engine.url) as first,
        FlashMoAChatClient("tiny", base_url=f"{downstream.url}/v1") as second,
    ):
        for started in (client, downstream_client):
            await started.flush_cache()
        yield first, second
    await wait_until_idle(client)
    await wait_until_idle(downstream_client)


def agent(name: str, client: Any, guide: str, **more: Any) -> Agent[Any]:
    return Agent(
        client,
        f"{guide[:2000]}\n\nYou are {name}.",
        name=name,
        default_options=options(**more),  # type: ignore[arg-type]
    )


def chain(clients: Pair, guide: str) -> Workflow:
    """Make a workflow of two agents on the first engine and one on the second; all are output."""
    agents = [
        agent(name, clients[name == "summary"], guide) for name in ("planner", "local", "summary")
    ]
    return SequentialBuilder(participants=agents, output_from="all").build()


async def run(workflow: Workflow, stream: bool = False) -> list[str]:
    """Return the agents' texts, in the order of the edges."""
    if not stream:
        result = await workflow.run(TASK)
        return [output.text for output in result.get_outputs()]
    texts: dict[str, str] = {}
    async for event in workflow.run(TASK, stream=True):
        if event.type == "output":
            assert isinstance(event.data, AgentResponseUpdate) and event.executor_id is not None
            texts[event.executor_id] = texts.get(event.executor_id, "") + event.data.text
    return list(texts.values())


def statuses(events: list[Event]) -> dict[str, str | None]:
    """Return how each call found its prompt stream, by its agent."""
    return {
        call.agent: call.usage.prompt_stream.status
        if call.usage is not None and call.usage.prompt_stream is not None
        else None
        for call in calls(events)
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_linked_sequence_answers_as_unlinked(
    clients: Pair, guide: str, stream: bool
) -> None:
    plain = await run(chain(clients, guide), stream)
    events: list[Event] = []
    workflow = chain(clients, guide)
    linked = link(workflow, listener=events.append)
    assert await run(workflow, stream) == plain
    assert len(plain) == 3 and all(plain)
    assert statuses(events) == {"planner": None, "local": "hit", "summary": "hit"}
    opened = {event.agent: event.upstream for event in events if isinstance(event, LinkOpened)}
    assert opened == {"local": ("planner",), "summary": ("planner", "local")}
    finished = [event.text for event in events if isinstance(event, CallFinished)]
    assert finished == plain
    await linked.close()
    assert [e.reason for e in events if isinstance(e, LinkClosed)] == ["used"] * 2


async def test_the_summary_was_prefilled_while_the_others_wrote(clients: Pair, guide: str) -> None:
    events: list[Event] = []
    workflow = chain(clients, guide)
    link(workflow, listener=events.append)
    result = await workflow.run(TASK)
    first, _, last = calls(events)
    assert last.usage is not None and last.usage.prompt_stream is not None
    assert last.usage.streamed_tokens is not None and last.usage.streamed_tokens > 300
    assert first.ended is not None
    assert min(span.start for span in last.usage.prompt_stream.prefills) < first.ended.at
    details = result.get_outputs()[-1].usage_details
    assert details["prompt/streamed_tokens"] == last.usage.streamed_tokens
    assert details["prompt/late_tokens"] == last.usage.late_tokens


async def test_a_workflow_that_runs_again(clients: Pair, guide: str) -> None:
    """Its agents remember the first run; each run is linked."""
    plain, linked = chain(clients, guide), chain(clients, guide)
    events: list[Event] = []
    link(linked, listener=events.append)
    for _ in range(2):
        assert await run(linked) == await run(plain)
    found = [call.usage for call in calls(events) if call.agent != "planner"]
    assert len(found) == 4
    assert all(u is not None and u.prompt_stream and u.prompt_stream.status == "hit" for u in found)


def panel(clients: Pair, guide: str) -> Workflow:
    """Make a workflow: three agents write at once; an aggregator asks the second engine."""
    experts = [agent(name, clients[0], guide[:900]) for name in ("food", "walks", "visas")]
    editor = Agent(clients[1], guide[:2000], default_options=options())  # type: ignore[arg-type]

    async def merge(results: list[AgentExecutorResponse]) -> str:
        parts = [f"{result.executor_id}: {result.agent_response.text}" for result in results]
        return (await editor.run("\n\n".join(parts))).text

    return ConcurrentBuilder(participants=experts).with_aggregator(merge).build()


@pytest.mark.parametrize("stream", [False, True])
async def test_linked_concurrent_agents_and_their_aggregator_answer_as_unlinked(
    clients: Pair, guide: str, stream: bool
) -> None:
    async def answer(workflow: Workflow) -> list[Any]:
        if not stream:
            return (await workflow.run(TASK)).get_outputs()
        events = workflow.run(TASK, stream=True)
        return [event.data async for event in events if event.type == "output"]

    plain = await answer(panel(clients, guide))
    events: list[Event] = []
    workflow = panel(clients, guide)
    link(workflow, include=["merge"], listener=events.append)
    assert await answer(workflow) == plain
    assert statuses(events) == {"food": None, "walks": None, "visas": None, "merge": "hit"}
    opened = {event.agent: event.upstream for event in events if isinstance(event, LinkOpened)}
    assert opened == {"merge": ("food", "walks", "visas")}


async def test_user_code_is_not_run_unless_included(clients: Pair, guide: str) -> None:
    events: list[Event] = []
    workflow = panel(clients, guide)
    link(workflow, listener=events.append)
    await workflow.run(TASK)
    (declined,) = [event for event in events if isinstance(event, LinkDeclined)]
    assert declined.agent == "merge" and "include=['merge']" in declined.reason
    assert "merge" not in {event.agent for event in events if isinstance(event, LinkOpened)}


async def test_an_aggregator_that_calls_a_client_directly_is_linked(
    clients: Pair, guide: str
) -> None:
    ran: list[int] = []

    def build() -> Workflow:
        async def merge(results: list[AgentExecutorResponse]) -> str:
            ran.append(len(results))
            texts = [Message("user", [result.agent_response.text]) for result in results]
            answer = await clients[1].get_response(
                [Message("system", [guide[:1500]]), *texts],
                options=options(),  # type: ignore[arg-type]
            )
            return answer.text

        experts = [agent(name, clients[0], guide[:900]) for name in ("food", "walks")]
        return ConcurrentBuilder(participants=experts).with_aggregator(merge).build()

    plain = (await build().run(TASK)).get_outputs()
    events: list[Event] = []
    workflow = build()
    link(workflow, include=["merge"], listener=events.append)
    assert (await workflow.run(TASK)).get_outputs() == plain
    assert statuses(events)["merge"] == "hit"
    assert ran == [2, 2, 2]  # The aggregator ran unlinked, on a copy, and in the linked run.


async def test_an_agent_with_tools_is_waited_for(clients: Pair, guide: str) -> None:
    """Its text is not streamed as it is written; the answers stay the same."""

    def look(place: str) -> str:
        return f"a fine {place}"

    def build() -> Workflow:
        first = Agent(
            clients[0],
            "Be brief.",
            name="first",
            tools=[look],
            default_options=options(),  # type: ignore[arg-type]
        )
        return SequentialBuilder(
            participants=[first, agent("second", clients[1], guide)], output_from="all"
        ).build()

    plain = await run(build())
    events: list[Event] = []
    workflow = build()
    link(workflow, listener=events.append)
    assert await run(workflow) == plain
    assert statuses(events)["second"] == "hit"


async def test_an_agent_that_calls_a_tool_ends_the_links_that_wait_for_it(
    clients: Pair, guide: str
) -> None:
    """The next agent also gets the call and its result; the agent after it is linked again."""

    def look(place: bool) -> str:
        return f"a fine {place}"

    # The answer ends where the tool call does.
    called = options(400, tool_choice="required", allow_multiple_tool_calls=False, extra_body={})

    def build() -> Workflow:
        first = Agent(
            clients[0],
            "Be brief.",
            name="first",
            tools=[look],
            default_options=called,  # type: ignore[arg-type]
        )
        rest = [agent(name, clients[1], guide) for name in ("second", "third")]
        return SequentialBuilder(participants=[first, *rest], output_from="all").build()

    plain = await run(build())
    events: list[Event] = []
    workflow = build()
    link(workflow, listener=events.append)
    assert await run(workflow) == plain
    assert {event.agent for event in events if isinstance(event, LinkWaits)} == {"second", "third"}
    assert statuses(events)["third"] == "hit"


async def test_a_failed_run_ends_its_links(clients: Pair, guide: str) -> None:
    bad = [agent("planner", clients[0], guide), agent("local", clients[0], guide, tokens=-5)]
    last = agent("summary", clients[1], guide)
    workflow = SequentialBuilder(participants=[*bad, last]).build()
    events: list[Event] = []
    linked = link(workflow, listener=events.append)
    with pytest.raises(Exception, match=r"max_tokens|failed"):
        await workflow.run(TASK)
    await linked.close()
    assert [event.agent for event in events if isinstance(event, CallFailed)] == ["local"]
    closed = {event.agent: event.reason for event in events if isinstance(event, LinkClosed)}
    assert closed["summary"] == "abort"
    for client in clients:
        assert (await wait_until_idle(client.engine)).pinned_streams == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_run_ends_its_links(clients: Pair, guide: str, stream: bool) -> None:
    agents = [
        agent("planner", clients[0], guide, tokens=4000),
        agent("summary", clients[1], guide),
    ]
    workflow = SequentialBuilder(participants=agents).build()
    events: list[Event] = []
    link(workflow, listener=events.append)
    running = asyncio.create_task(run(workflow, stream))
    with anyio.fail_after(30):
        while not any(isinstance(event, LinkOpened) for event in events):  # noqa: ASYNC110
            await anyio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for client in clients:
        await wait_until_idle(client.engine)
    with anyio.fail_after(30):
        while not any(isinstance(event, LinkClosed) for event in events):  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_run_that_stops_early_leaves_nothing(clients: Pair, guide: str) -> None:
    """Its reader stops after the first agent, so the agents after it are never asked."""
    workflow = chain(clients, guide)
    link(workflow)
    events = workflow.run(TASK, stream=True)
    async for event in events:
        if event.type == "executor_completed" and event.executor_id == "planner":
            break
    del events, event
    for client in clients:
        await wait_until_idle(client.engine)


async def test_a_plain_server_works_unlinked_with_one_warning(
    plain_engine: LocalEngine,
    guide: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashmoa.linking.link._plain_engines", set())
    async with FlashMoAChatClient("tiny", base_url=plain_engine.url) as plain:
        build: Callable[[], Workflow] = lambda: chain((plain, plain), guide)  # noqa: E731
        unlinked = await run(build())
        with caplog.at_level(logging.WARNING, "flashmoa"):
            for _ in range(2):
                workflow = build()
                link(workflow)
                assert await run(workflow) == unlinked
    warnings = [
        record for record in caplog.records if "without the flashmoa-sglang" in record.message
    ]
    assert len(warnings) == 1


async def test_link_refuses_objects_that_it_cannot_link(clients: Pair, guide: str) -> None:
    with pytest.raises(TypeError, match="build it"):
        link(SequentialBuilder(participants=[agent("one", clients[0], guide)]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nobody"):
        link(chain(clients, guide), include=["nobody"])
    other = OpenAIChatCompletionClient("gpt-4o", api_key="none")
    workflow = SequentialBuilder(participants=[agent("one", other, guide)]).build()
    with pytest.raises(ValueError, match="nothing to link"):
        link(workflow)
    await other.client.close()


async def test_a_run_is_traced(clients: Pair, guide: str, tmp_path: Path) -> None:
    file, events = tmp_path / "run.jsonl", list[Event]()
    workflow = chain(clients, guide)
    linked = link(workflow, trace=file, listener=events.append)
    await workflow.run(TASK)
    await linked.close()
    assert read(file) == events and len(calls(events)) == 3


async def test_a_serialized_client_has_only_its_settings(clients: Pair) -> None:
    saved = clients[0].to_dict()
    assert saved["base_url"].endswith("/v1") and not {"engine", "linked_workflows"} & saved.keys()
