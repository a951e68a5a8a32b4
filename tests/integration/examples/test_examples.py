"""Test that the examples of docs/recipes.md answer the same linked, and hit their streams."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai import AsyncOpenAI

from flashmoa import EngineClient
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.engine import PromptUsage
from flashmoa.observe import Event, LinkClosed
from flashmoa.observe.calls import calls
from flashmoa.openai import AsyncOpenAI as openai_client
from flashmoa.openai import run
from tests.conftest import ROOT
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the folder of the examples to the path, since they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture
async def idle(client: EngineClient) -> AsyncGenerator[EngineClient]:
    """An engine that must be idle again in the end."""
    await client.flush_cache()
    yield client
    await wait_until_idle(client)


async def test_the_openai_client_example_is_the_same_linked(idle: EngineClient) -> None:
    example: Any = importlib.import_module("openai_client")
    async with AsyncOpenAI(base_url=f"{idle.url}/v1", api_key="none") as openai:
        linked = await example.review_linked(openai, idle, "tiny")
        unlinked = await example.review_unlinked(openai, "tiny")
    assert linked.choices[0].message.content == unlinked.choices[0].message.content
    usage = PromptUsage.from_openai(linked.usage.model_dump())
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"


@pytest.mark.slow
async def test_the_langgraph_example_is_the_same_linked(idle: EngineClient) -> None:
    example: Any = importlib.import_module("langgraph_chain")
    model = example.chat(idle.url, "tiny")
    graph = example.build_graph(model)
    events: list[Event] = []
    for task in example.TASKS:
        async with run("langgraph", listener=events.append):
            linked = await graph.ainvoke({"task": task})
    unlinked = await graph.ainvoke({"task": example.TASKS[-1]})
    assert linked == unlinked and set(linked) == {"task", "draft", "review", "summary"}
    closed = {event.agent: event.reason for event in events if isinstance(event, LinkClosed)}
    assert closed == {"review": "used", "summary": "used"}
    await model.root_async_client.close()


@pytest.mark.slow
async def test_the_program_of_openai_calls_is_the_same_linked(idle: EngineClient) -> None:
    example: Any = importlib.import_module("openai_runs")
    async with openai_client(base_url=idle.url) as client:
        for task in example.TASKS:
            events: list[Event] = []
            async with run("plan", listener=events.append):
                linked = await example.plan(client, "tiny", task)
        assert linked == await example.plan(client, "tiny", example.TASKS[-1])
    assert [call.started.stream_id is not None for call in calls(events)] == [
        False,
        True,
        True,
        True,
    ]
    assert "streamed" in example.describe(events)


async def test_the_agent_framework_example_is_the_same_linked(idle: EngineClient) -> None:
    example: Any = importlib.import_module("agent_framework_chain")
    events: list[Event] = []
    async with FlashMoAChatClient("tiny", base_url=idle.url) as client:
        linked = await example.run(client, linked=True, listener=events.append)
        assert linked == await example.run(client, linked=False)
    found = [call.usage and call.usage.prompt_stream for call in calls(events)]
    assert [stream and stream.status for stream in found] == [None, "hit", "hit"]


async def test_an_example_runs_from_its_command_line(
    idle: EngineClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example: Any = importlib.import_module("openai_client")
    monkeypatch.setattr(sys, "argv", ["openai_client.py", "--engine", idle.url])
    await example.main()
    assert "The same unlinked: True" in capsys.readouterr().out
