"""Test that predictions have every field of a request that shapes its prompt."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from agent_framework.orchestrations import SequentialBuilder
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat

import flashmoa.agent_framework
import flashmoa.autogen
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.observe import Event
from flashmoa.openai import AsyncOpenAI
from tests.integration.frameworks.agent_framework.workflows import agent
from tests.integration.openai.programs import play_linked, statuses
from tests.integration.support import start_special_engine

# Shows whatever it is given, before the messages.
TEMPLATE = """
{{- reasoning_effort }}|{{ enable_thinking }}|{{ x }}|
{%- for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}<assistant>"""
TASK = "Plan three days in Nepal for two people."
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("walk", "drive", "fly")
]
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
BODY: dict[str, Any] = {"ignore_eos": True, "chat_template_kwargs": {"x": "y"}}


@pytest.fixture(scope="module")
async def showing(
    engines: LocalEngines, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[LocalEngine]:
    template = tmp_path_factory.mktemp("template") / "all.jinja"
    template.write_text(TEMPLATE)
    async with start_special_engine(engines, model, "--chat-template", str(template)) as engine:
        yield engine


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none"},
        {"extra_body": {"reasoning": {"effort": "high"}}},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "drive"}}},
    ],
    ids=["effort", "no effort", "reasoning", "no tool", "a named tool"],
)
async def test_a_call_of_a_run_is_predicted_with_its_fields(
    showing: LocalEngine, guide: str, fields: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    body = {**BODY, **fields.get("extra_body", {})}
    async with AsyncOpenAI(base_url=showing.url, max_retries=0) as client:

        async def ask(content: str, **more: Any) -> str:
            messages: Any = [{"role": "user", "content": content}]
            answer = await client.chat.completions.create(
                **{"model": "tiny", "messages": messages, **SAMPLING, "extra_body": BODY, **more}
            )
            return answer.choices[0].message.content or ""

        async def program() -> None:
            plan = await ask(TASK)
            await ask(f"{guide[:800]}\nCheck:\n{plan}", **{**fields, "extra_body": body})

        await play_linked(request.node.name, program)
        events: list[Event] = []
        await play_linked(request.node.name, program, events)
    assert statuses(events) == [None, "hit"]


async def test_an_autogen_team_is_predicted_with_its_clients_fields(
    showing: LocalEngine, guide: str
) -> None:
    client = FlashMoAChatCompletionClient(
        model="tiny", base_url=showing.url, reasoning_effort="low", extra_body=BODY, **SAMPLING
    )
    agents = [
        AssistantAgent(name, client, system_message=f"{guide[:800]}\nYou are {name}.")
        for name in ("writer", "editor")
    ]
    team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3))
    events: list[Event] = []
    linked = flashmoa.autogen.link(team, listener=events.append)
    try:
        await team.run(task=TASK)
    finally:
        await linked.close()
        await client.close()
    assert statuses(events) == [None, "hit"]


async def test_a_workflow_of_agent_framework_is_predicted_with_its_agents_fields(
    showing: LocalEngine, guide: str
) -> None:
    events: list[Event] = []
    async with FlashMoAChatClient("tiny", base_url=showing.url) as client:
        agents = [
            agent(name, client, guide[:800], reasoning_effort="low", extra_body=BODY)
            for name in ("writer", "editor")
        ]
        workflow = SequentialBuilder(participants=agents).build()
        flashmoa.agent_framework.link(workflow, listener=events.append)
        await workflow.run(TASK)
    assert statuses(events) == [None, "hit"]
