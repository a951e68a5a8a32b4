"""Test which clients a link observes, and what is refused; no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import SequentialBuilder
from openai import AsyncOpenAI

from flashmoa.agent_framework import FlashMoAChatClient, _client, link
from tests.unit.agent_framework.fakes import agent, chain, make_client

pytestmark = pytest.mark.anyio


async def test_a_refused_workflow_leaves_an_existing_trace_as_it_is(tmp_path: Path) -> None:
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


def test_nested_workflows_are_named_if_there_is_nothing_else_to_link() -> None:
    client, _ = make_client()
    builder = SequentialBuilder(participants=[agent(client, name) for name in "ab"])
    with pytest.raises(ValueError, match=r"\['a', 'b'\] run workflows of their own"):
        link(builder.with_request_info().build())


def test_a_builder_is_refused() -> None:
    client, _ = make_client()
    with pytest.raises(TypeError, match="build it"):
        link(SequentialBuilder(participants=[agent(client, "a")]))  # type: ignore[arg-type]


def test_a_client_of_openai_is_refused() -> None:
    """Its requests would go to another server than the links to their prompts."""
    mine = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="k")
    with pytest.raises(ValueError, match="give base_url"):
        FlashMoAChatClient("m", async_client=mine)


async def test_the_calling_executor_is_sought_once_for_all_linked_teams(
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
    assert [sent.status for sent in fake.sent] == [None, "hit"]
