"""Test frameworks that do not go with OpenAI's newest client, in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from flashmoa.openai import instrument
from tests.integration.openai.programs import (
    BODY,
    TOKENS,
    Agent,
    Clients,
    Program,
    Rounds,
    check_programs,
    play,
)

os.environ |= {"OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true"}

pytestmark = [
    pytest.mark.timeout(1200),
    # CrewAI uses deprecated functions.
    pytest.mark.filterwarnings("ignore"),
]

# Clients of CrewAI's models, which do not close them.
_opened: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def llama_index_program(rounds: Rounds, clients: Clients, guide: str) -> Program:
    """Make a program of workflows, which take the client."""
    # Without the second one, engines do not say how they found a prompt.
    more = {"extra_body": BODY, "stream_options": {"include_usage": True}}
    models = [
        OpenAILike(
            model="tiny",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_tokens=TOKENS,
            additional_kwargs=more,
            async_openai_client=client,
        )
        for client in (clients.first, clients.second)
    ]

    async def call(agent: Agent, content: str) -> str:
        model, prompt = models[0 if agent.is_first else 1], f"{guide}\n{agent.role}"
        writer = FunctionAgent(
            name="writer", description="Writes.", system_prompt=prompt, llm=model
        )
        return str(await AgentWorkflow(agents=[writer]).run(user_msg=content))

    return partial(play, rounds, call)


def crewai_program(rounds: Rounds, clients: Clients, guide: str) -> Program:
    """Make a program of crews, which call their models in threads."""
    import crewai

    models: list[Any] = [
        crewai.LLM(
            model="openai/tiny",
            base_url=str(client.base_url),
            api_key="none",
            temperature=0,
            max_tokens=TOKENS,
            additional_params={"extra_body": BODY},
        )
        for client in (clients.first, clients.second)
    ]
    for model in models:
        instrument(model)
        _opened.append(model._client)

    async def call(agent: Agent, content: str) -> str:
        backstory, model = f"{guide}\n{agent.role}", models[0 if agent.is_first else 1]
        member = crewai.Agent(role="writer", goal="Write.", backstory=backstory, llm=model)
        task = crewai.Task(description=content, expected_output="A text.", agent=member)
        return (await crewai.Crew(agents=[member], tasks=[task]).akickoff()).raw

    return partial(play, rounds, call)


@pytest.mark.parametrize("make", [llama_index_program, crewai_program])
async def test_random_programs_answer_the_same_linked(
    make: Any, clients: Clients, guide: str
) -> None:
    await check_programs(make, clients, guide)
