"""Make workflows of Agent Framework on two engines, run them, and read how they were linked."""

from typing import Any

from agent_framework import Agent, AgentResponseUpdate, Workflow
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.observe import Event
from flashmoa.observe.calls import calls

Pair = tuple[FlashMoAChatClient, FlashMoAChatClient]
TASK = "Plan a trip to Nepal."


def options(tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True},
        **more,
    }


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
