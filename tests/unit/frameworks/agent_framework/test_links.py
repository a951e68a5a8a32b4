"""Test which clients a link observes, and which arguments it refuses; no engine."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_framework import Agent, ChatResponse, FunctionTool, Message, Workflow, WorkflowBuilder
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import (
    ConcurrentBuilder,
    SequentialBuilder,
)
from openai import AsyncOpenAI

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.frameworks import ChatRequest
from flashmoa.frameworks.agent_framework import client as _client
from flashmoa.frameworks.agent_framework.dry_run import request_after_tools
from flashmoa.observe.events import FIRST
from tests.unit.frameworks.agent_framework.fakes import ANSWER, agent, call_tool, chain, make_client


async def test_a_refused_workflow_leaves_its_trace(tmp_path: Path) -> None:
    client, _ = make_client()
    file, workflow = tmp_path / "run.jsonl", chain(client)
    linked = link(workflow, trace=file)
    await workflow.run("task")
    await linked.close()
    written = file.read_text()
    stock = OpenAIChatCompletionClient("m", api_key="none")
    with pytest.raises(ValueError, match="Give the agents one"):
        link(SequentialBuilder(participants=[Agent(stock, name="a")]).build(), trace=file)
    assert written and file.read_text() == written


def test_nested_workflows_are_named() -> None:
    client, _ = make_client()
    builder = SequentialBuilder(participants=[agent(client, name) for name in "ab"])
    with pytest.raises(ValueError, match=r"\['a', 'b'\] run workflows of their own"):
        link(builder.with_request_info().build())


def concurrent(client: FlashMoAChatClient) -> Workflow:
    return ConcurrentBuilder(participants=[agent(client, name) for name in "abc"]).build()


def conditional(client: FlashMoAChatClient) -> Workflow:
    one, two = [agent(client, name) for name in "ab"]
    return WorkflowBuilder(start_executor=one).add_edge(one, two, condition=bool).build()


@pytest.mark.parametrize(
    ("make", "logged", "reasons"),
    [
        (concurrent, "is certain to read", {FIRST, "it reads no agent's text"}),
        (
            conditional,
            "is certain to read",
            {FIRST, "it is not certain what it reads, by the edges that lead to it"},
        ),
    ],
)
async def test_a_workflow_without_links_says_so(
    make: Callable[[FlashMoAChatClient], Workflow],
    logged: str,
    reasons: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, _ = make_client()
    workflow = make(client)
    with caplog.at_level(logging.WARNING, "flashmoa"):
        linked = link(workflow)
    (warning,) = caplog.messages
    assert warning.startswith("link(workflow) links nothing: ") and logged in warning
    await workflow.run("task")
    assert linked.report.summary.linked == 0
    assert {call.started.unlinked for call in linked.report.calls} == reasons
    shown = " ".join(str(linked).split())
    assert all(reason in shown for reason in reasons - {FIRST})
    await linked.close()


def test_a_workflow_with_a_linkable_agent_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link(chain(make_client()[0]))
    assert caplog.messages == []


async def test_an_agent_after_another_client_says_so() -> None:
    client, _ = make_client()
    stock = OpenAIChatCompletionClient("m", api_key="none")
    answer = ChatResponse(messages=[Message("assistant", ["text"])])

    async def respond(**_: object) -> ChatResponse:
        return answer

    stock._inner_get_response = respond  # type: ignore[method-assign,assignment]
    members = [agent(client, "a"), agent(stock, "b"), agent(client, "c")]
    workflow = SequentialBuilder(participants=members).build()
    linked = link(workflow)
    await workflow.run("task")
    assert [call.started.unlinked for call in linked.report.calls] == [
        FIRST,
        "it reads what b writes, which has no FlashMoAChatClient",
    ]
    await linked.close()


def test_a_builder_is_refused() -> None:
    client, _ = make_client()
    with pytest.raises(TypeError, match="build it"):
        link(SequentialBuilder(participants=[agent(client, "a")]))  # type: ignore[arg-type]


def test_a_client_of_openai_is_refused() -> None:
    """Its requests would go to another server than the links to their prompts."""
    mine = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="k")
    with pytest.raises(ValueError, match="give base_url"):
        FlashMoAChatClient("m", async_client=mine)


async def test_the_calling_executor_is_sought_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may be used by thousands of workflows, and to seek it takes a walk of the stack."""
    client, fake = make_client()
    others = [chain(client) for _ in range(5)]
    for workflow in others:
        link(workflow)
    found: list[object] = []
    find = _client.find_calling_executor

    def count() -> object:
        found.append(find())
        return found[-1]

    monkeypatch.setattr(_client, "find_calling_executor", count)
    workflow = chain(client)
    link(workflow)
    await workflow.run("task")
    assert found == [workflow.executors["a"], workflow.executors["b"]]
    assert fake.statuses == [None, "hit"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_is_linked_while_its_tools_run_and_its_reader_after_them(
    stream: bool,
) -> None:
    """The reader also gets the call and its result, which its link has once they are there."""

    def answer(body: Mapping[str, Any]) -> Any:
        is_done = body["messages"][-1]["role"] == "tool" or not body.get("tools")
        return ANSWER if is_done else call_tool("look", place="lake")

    async def look(place: str) -> str:
        await asyncio.sleep(0.2)
        return f"A fine {place}."

    client, fake = make_client(answer)
    members = [agent(client, "a", tools=[look]), agent(client, "b"), agent(client, "c")]
    workflow = SequentialBuilder(participants=members).build()
    linked = link(workflow)
    if stream:
        async for _ in workflow.run("task", stream=True):
            pass
    else:
        await workflow.run("task")
    assert fake.statuses == [None, "hit", "hit", "hit"]
    assert [call.agent for call in linked.report.calls] == ["a", "a", "b", "c"]
    await linked.close()


@pytest.mark.parametrize("approval", ["always_require", "never_require"])
async def test_no_request_is_expected_after_a_tool_that_waits_for_a_person(approval: Any) -> None:
    client, _ = make_client()
    workflow = SequentialBuilder(participants=[agent(client, "a")]).build()
    tool = FunctionTool(name="look", func=lambda place: place, approval_mode=approval)
    are_run = _client.runs_at_once(tool)
    answer = _client.ToolCalls((), ["look"], are_run, lambda _: ChatRequest(client.engine, {}))
    expected = request_after_tools(workflow, "a", answer)
    assert (expected is not None) == are_run == (approval == "never_require")
