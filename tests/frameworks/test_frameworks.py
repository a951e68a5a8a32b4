"""Test that random programs of several agent frameworks answer the same linked and unlinked."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypedDict

import agents
import pydantic_ai
import pytest
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from flashmoa.openai import instrument
from tests.frameworks.conftest import MODEL
from tests.integration.openai.programs import (
    BODY,
    STOP,
    TOKENS,
    Agent,
    Clients,
    Program,
    Rounds,
    check_programs,
    play,
    read,
)


class State(TypedDict):
    """Answers by the place of their agents."""

    answers: Annotated[dict[int, str], operator.or_]


def langgraph_program(rounds: Rounds, clients: Clients, guide: str) -> Program:
    """Make a graph with a node for each agent. The nodes of a round run at once."""
    models = [
        instrument(
            ChatOpenAI(
                model="tiny",
                base_url=str(client.base_url),
                api_key="none",  # type: ignore[arg-type]
                temperature=0,
                max_completion_tokens=TOKENS,
                extra_body=BODY,
            )
        ).client
        for client in (clients.first, clients.second)
    ]
    graph = StateGraph(State)
    before: list[str] = [START]
    place = 0
    for each in rounds:
        names: list[str] = []
        for agent in each:

            async def node(state: State, agent: Agent = agent, place: int = place) -> Any:
                answers = [state["answers"][index] for index in sorted(state["answers"])]
                messages = [
                    ("system", f"{guide}\n{agent.role}"),
                    ("user", read(agent, answers)),
                ]
                model = models[0 if agent.is_first else 1]
                if agent.streams:
                    text = "".join([str(part.content) async for part in model.astream(messages)])
                else:
                    text = str((await model.ainvoke(messages)).content)
                return {"answers": {place: text}}

            names.append(f"agent {place}")
            graph.add_node(names[-1], node)
            graph.add_edge(before if before != [START] else START, names[-1])
            place += 1
        before = names
    compiled = graph.compile()

    async def program() -> list[str]:
        answers = (await compiled.ainvoke({"answers": {}}))["answers"]
        return [answers[index] for index in sorted(answers)]

    return program


def agents_sdk_program(
    rounds: Rounds,
    clients: Clients,
    guide: str,
    kind: type[agents.Model] = agents.OpenAIChatCompletionsModel,
    **ends: Any,
) -> Program:
    """Make a program of sequential code; an agent that streams hands over to another one."""
    agents.set_tracing_disabled(True)
    models: list[Any] = [
        kind(MODEL, client)  # type: ignore[call-arg]
        for client in (clients.first, clients.second)
    ]
    ends = ends or {"max_tokens": TOKENS, "extra_body": BODY}
    settings = agents.ModelSettings(temperature=0, **ends)

    async def call(agent: Agent, content: str) -> str:
        instructions = f"{guide}\n{agent.role}"
        model = models[0 if agent.is_first else 1]
        actor: Any = agents.Agent(
            "writer", instructions=instructions, model=model, model_settings=settings
        )
        if agent.streams:
            required = agents.ModelSettings(
                temperature=0, max_tokens=400, tool_choice="required", parallel_tool_calls=False
            )
            actor = agents.Agent(
                "manager", instructions="Hand over.", model=models[0], handoffs=[actor],
                model_settings=required,
            )  # fmt: skip
        return str((await agents.Runner.run(actor, content)).final_output)

    return partial(play, rounds, call)


def agents_sdk_responses_program(rounds: Rounds, clients: Clients, guide: str) -> Program:
    """Make the same of the SDK's default models, which refuse answers that are cut."""
    ends = {"max_tokens": 1000, "extra_body": {"stop": STOP}}
    return agents_sdk_program(rounds, clients, guide, agents.OpenAIResponsesModel, **ends)


def pydantic_ai_program(rounds: Rounds, clients: Clients, guide: str) -> Program:
    """Make a program of sequential code; an agent that streams delegates to another one."""
    models = [
        OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client))
        for client in (clients.first, clients.second)
    ]
    settings: Any = {"temperature": 0, "max_tokens": TOKENS, "extra_body": BODY}

    async def call(agent: Agent, content: str) -> str:
        model = models[0 if agent.is_first else 1]
        writer = pydantic_ai.Agent(
            model, instructions=f"{guide}\n{agent.role}", model_settings=settings
        )

        async def delegate(short: bool) -> str:
            """Let the writer answer."""
            return (await writer.run(f"{content}\nShort: {short}")).output

        if not agent.streams:
            return (await writer.run(content)).output
        manager = pydantic_ai.Agent(
            models[0], instructions="Delegate.", output_type=delegate,
            model_settings={"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False},
        )  # fmt: skip
        return str((await manager.run(content)).output)

    return partial(play, rounds, call)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "make",
    [langgraph_program, agents_sdk_program, agents_sdk_responses_program, pydantic_ai_program],
    ids=lambda make: make.__name__,
)
async def test_random_programs_answer_the_same_linked(
    make: Callable[[Rounds, Clients, str], Program], clients: Clients, guide: str
) -> None:
    await check_programs(make, clients, guide)
