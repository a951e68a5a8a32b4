"""Teams in which messages decide who speaks: an orchestrator, a selector, tools."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
)
from autogen_agentchat.tools import AgentTool

from flashmoa.autogen import SELECTOR_PROMPT, FlashMoAChatCompletionClient, link
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkWaits
from tests.integration.autogen.exactness import (
    CallOutcome,
    count_outcomes,
    finished_calls,
    mostly_hit,
)
from tests.integration.autogen.teams import Custom
from tests.integration.scripted import script
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient


@asynccontextmanager
async def connected(
    engine: LocalEngine, max_tokens: int = 40, **more: Any
) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True},
        **more,
    )
    try:
        await client.engine.flush_cache()
        yield client
    finally:
        await client.close()
        # Nothing is left open for calls that a closed client will not make.
        async with EngineClient(engine.url) as other:
            await wait_until_idle(other)


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    async with connected(engine) as client:
        yield client
        await wait_until_idle(client.engine)


def agent(client: Client, name: str, **more: Any) -> AssistantAgent:
    return AssistantAgent(
        name, model_client=client, system_message=f"You are {name}. " + "Be brief. " * 20, **more
    )


def are_predicted(kind: str, calls: list[CallOutcome]) -> bool:
    """Count calls; return whether all that were not too early hit, and at least half did."""
    count_outcomes(kind, calls)
    return {call.status for call in calls} <= {"hit", "late"} and mostly_hit(calls)


async def run_linked(team: BaseGroupChat, task: str) -> tuple[TaskResult, list[Event]]:
    events: list[Event] = []
    linked = link(team, listener=events.append)
    result = await team.run(task=task)
    await linked.close()
    return result, events


def messages_of(result: TaskResult) -> list[tuple[str, str]]:
    return [(message.source, message.to_text()) for message in result.messages]


@pytest.mark.slow
async def test_an_orchestrators_prompts_are_predicted(
    engine: LocalEngine, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without structured output the ledger is an ordinary completion.
    info: dict[str, Any] = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": False,
        "multiple_system_messages": False,
    }
    ledgers = 0

    def answer_to(request: dict[str, Any]) -> Any:
        nonlocal ledgers
        if "response_format" not in request:
            return None
        ledgers += 1
        answers = {
            "is_request_satisfied": ledgers == 4,
            "is_progress_being_made": True,
            "is_in_loop": False,
            "instruction_or_question": "Go on.",
            "next_speaker": ("coder", "writer")[ledgers % 2],
        }
        return json.dumps({key: {"reason": "so", "answer": a} for key, a in answers.items()})

    script(monkeypatch, answer_to)
    async with connected(engine, model_info=info) as client:
        agents = [agent(client, name) for name in ("coder", "writer")]
        team = MagenticOneGroupChat(agents, model_client=client, max_turns=6)
        _, events = await run_linked(team, guide[:600])
    calls = finished_calls(events)
    reading = [
        call
        for before, call in pairwise(calls)
        if call.agent == "(manager)" and before.agent != "(manager)"
    ]
    assert len(reading) == 3
    speaking = [call for call in calls if call.agent != "(manager)"]
    assert are_predicted("magentic one", [*reading, *speaking])
    assert ledgers == 4


async def test_prompts_of_a_selector_and_its_candidates_are_predicted(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(["two", "three", "one", "three", "two"] * 2)

    def answer_to(request: dict[str, Any]) -> Any:
        text = request["messages"][-1]["content"]
        return next(turns) if "You decide who speaks next" in text else None

    script(monkeypatch, answer_to)
    agents = [agent(model_client, name) for name in ("one", "two", "three")]
    team = SelectorGroupChat(
        agents,
        model_client=model_client,
        selector_prompt=SELECTOR_PROMPT,
        termination_condition=MaxMessageTermination(6),
    )
    _, events = await run_linked(team, guide[:600])
    calls = finished_calls(events)
    assert [call.agent for call in calls[::2]] == ["(manager)"] * 5
    assert [call.agent for call in calls[1::2]] == ["two", "three", "one", "three", "two"]
    # All but the very first one, about which nothing is known before.
    assert are_predicted("selector, our prompt", calls[1:])


@pytest.mark.parametrize("reflect", [False, True])
async def test_tool_calls_are_not_streamed_and_reflections_are(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, reflect: bool
) -> None:
    async def look(place: str) -> str:
        return f"a fine {place}"

    def answer_to(request: dict[str, Any]) -> Any:
        return ("look", {"place": "lake"}) if request.get("tools") else None

    script(monkeypatch, answer_to)
    one = agent(model_client, "one", tools=[look], reflect_on_tool_use=reflect)
    team = RoundRobinGroupChat([one, agent(model_client, "two")], max_turns=4)
    result, events = await run_linked(team, guide[:600])
    readers = [call for call in finished_calls(events) if call.agent == "two"]
    assert len(readers) == 2
    assert are_predicted("tools, reflected on" if reflect else "tools", readers)
    waits = {event.reason for event in events if isinstance(event, LinkWaits)}
    assert waits == {
        "it has tools, and its answer is not requested as a stream (model_client_stream)"
    }
    assert ("one", "a fine lake") in messages_of(result) or reflect


async def test_auto_link_links_a_team_without_a_call_of_link(
    engine: LocalEngine, guide: str
) -> None:
    events: list[Event] = []
    async with connected(engine, auto_link=True, listener=events.append) as client:
        assert client.dump_component().config["auto_link"] is True
        team = RoundRobinGroupChat([agent(client, n) for n in ("one", "two", "three")], max_turns=4)
        await team.run(task=guide[:600])
        finished = finished_calls(events)
        assert [call.agent for call in finished] == ["one", "two", "three", "one"]
        # How much the engine has computed ahead depends on what it has measured of its costs.
        assert [call.status for call in finished] == [None, "hit", "hit", "hit"]
        alone = await agent(client, "alone").run(task="Go.")
        assert len(alone.messages) == 2


async def test_linking_again_replaces_the_first_link(model_client: Client, guide: str) -> None:
    team = RoundRobinGroupChat([agent(model_client, n) for n in ("one", "two")], max_turns=2)
    first: list[Event] = []
    link(team, listener=first.append)
    _, events = await run_linked(team, guide[:600])
    assert not first
    assert [call.status for call in finished_calls(events)][1:] == ["hit"]


async def test_an_agent_used_as_a_tool_is_not_mistaken_for_its_caller(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_to(request: dict[str, Any]) -> Any:
        return ("inner", {"task": "Look."}) if request.get("tools") else None

    script(monkeypatch, answer_to)
    inner = AgentTool(agent(model_client, "inner"))
    one = agent(model_client, "one", tools=[inner], reflect_on_tool_use=False)
    team = RoundRobinGroupChat([one, agent(model_client, "two")], max_turns=2)
    _, events = await run_linked(team, guide[:600])
    calls = finished_calls(events)
    assert [call.agent for call in calls] == ["one", "two"]
    assert are_predicted("an agent as a tool", calls[1:])


async def test_a_team_that_cannot_be_linked_runs_with_auto_link(engine: LocalEngine) -> None:
    class Own(Custom):
        """Keeps its client in an attribute in which links do not look for it."""

        def __init__(self, name: str, client: Client) -> None:
            super().__init__(name, client)
            self._llm = client
            del self._model_client

        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            prompt = [message.to_model_message() for message in messages]
            text = str((await self._llm.create(prompt)).content)
            return Response(chat_message=TextMessage(content=text, source=self.name))

    async with connected(engine, auto_link=True) as client:
        team = RoundRobinGroupChat([Own("one", client), Own("two", client)], max_turns=2)
        assert len((await team.run(task="Go.")).messages) == 3
