"""Test that agents with tools ask the same linked, and that what they ask next was prefilled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import agents
import anyio
import pydantic_ai
import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from flashmoa.observe import Event, LinkOpened
from flashmoa.openai import instrument
from tests.frameworks.conftest import MODEL
from tests.integration.openai.programs import STOP, TASK, Clients, play_linked, statuses

# Enough for a call of a tool, which the engine's grammar ends.
TOKENS = 100

Tool = Callable[[bool], Awaitable[str]]


async def langgraph_agent(client: Any, guide: str, tool: Tool) -> str:
    """Run a graph of a model, which must call the tool at first, and the tool."""
    chat = ChatOpenAI(
        model="tiny",
        base_url=str(client.base_url),
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=TOKENS,
    )
    tools = [StructuredTool.from_function(coroutine=tool, name="look", description="Look.")]
    instrument(chat)
    forced = chat.bind_tools(tools, tool_choice="required", parallel_tool_calls=False)
    free = chat.bind_tools(tools)

    async def ask(state: MessagesState) -> Any:
        is_first = len(state["messages"]) == 1
        prompt = [("system", guide), *state["messages"]]
        return {"messages": [await (forced if is_first else free).ainvoke(prompt)]}

    def calls_tools(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("agent", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", calls_tools)
    graph.add_edge("tools", "agent")
    done = await graph.compile().ainvoke({"messages": [("user", TASK)]})  # type: ignore[arg-type]
    return str(done["messages"][-1].content)


async def agents_sdk_agent(
    client: Any,
    guide: str,
    tool: Tool,
    kind: type[agents.Model] = agents.OpenAIChatCompletionsModel,
    **ends: Any,
) -> str:
    """Run an agent that must call the tool at first."""
    agents.set_tracing_disabled(True)
    ends = {"max_tokens": TOKENS, **ends}
    settings = agents.ModelSettings(
        temperature=0, tool_choice="required", parallel_tool_calls=False, **ends
    )
    actor: Any = agents.Agent(
        "looker",
        instructions=guide,
        model=kind(MODEL, client),  # type: ignore[call-arg]
        tools=[agents.function_tool(tool, name_override="look")],
        model_settings=settings,
    )
    return str((await agents.Runner.run(actor, TASK)).final_output)


async def agents_sdk_responses_agent(client: Any, guide: str, tool: Tool) -> str:
    """Run the same with the SDK's default model, which refuses answers that are cut."""
    ends = {"max_tokens": 1000, "extra_body": {"stop": STOP}}
    return await agents_sdk_agent(client, guide, tool, agents.OpenAIResponsesModel, **ends)


async def pydantic_ai_agent(client: Any, guide: str, tool: Tool) -> str:
    """Run an agent that must call the tool at first."""

    def settings(context: pydantic_ai.RunContext[Any]) -> Any:
        choice = "required" if context.run_step == 1 else "auto"
        more = {"temperature": 0, "max_tokens": TOKENS, "parallel_tool_calls": False}
        return {**more, "tool_choice": choice}

    looker = pydantic_ai.Agent(
        OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client)),
        instructions=guide,
        tools=[pydantic_ai.Tool(tool, name="look")],
        model_settings=settings,
    )
    return (await looker.run(TASK)).output


@pytest.mark.parametrize(
    "run_agent",
    [langgraph_agent, agents_sdk_agent, agents_sdk_responses_agent, pydantic_ai_agent],
    ids=lambda each: each.__name__,
)
async def test_what_an_agent_asks_after_its_tool_was_prefilled(
    run_agent: Callable[[Any, str, Tool], Awaitable[str]], clients: Clients, guide: str
) -> None:
    async def fine(far: bool) -> str:
        """Look."""
        return f"A fine place, far: {far}."

    async def play(events: Sequence[Event], *, waits: bool) -> str:
        async def look(far: bool) -> str:
            """Look."""
            with anyio.fail_after(20):
                while waits and not any(isinstance(event, LinkOpened) for event in events):  # noqa: ASYNC110
                    await anyio.sleep(0.002)
            return await fine(far)

        return await run_agent(clients.first, guide[:3000], look)

    unlinked = await play([], waits=False)
    for _ in ("first", "second"):
        events: list[Event] = []
        program = partial(play, events, waits=True)
        assert await play_linked(f"{run_agent.__name__}", program, events) == unlinked
        assert statuses(events) == [None, "hit"]
