"""Programs of Pydantic AI: code between agents, delegation, and output functions."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from flashmoa.openai import AsyncOpenAI
from tests.coverage.answers import Script, ask_experts, call
from tests.coverage.measure import instructions, look, task, team_programs


class Team:
    """Makes agents that share a client, and runs them."""

    def __init__(self, url: str, tools: bool) -> None:
        self.client = AsyncOpenAI(base_url=url)
        self._tools = [look] if tools else []

    def agent(self, name: str, tools: Any = None, **more: Any) -> Agent[Any, Any]:
        model = OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=self.client))
        own = self._tools if tools is None else tools
        return Agent(model, name=name, instructions=instructions(name), tools=own, **more)

    async def ask(self, name: str, *texts: str) -> str:
        return str((await self.agent(name).run("\n\n".join([task(), *texts]))).output)


async def chain(team: Team) -> list[str]:
    one = await team.ask("one")
    two = await team.ask("two", one)
    return [one, two, await team.ask("three", one, two)]


async def fan(team: Team) -> list[str]:
    one = await team.ask("one")
    both = await asyncio.gather(*(team.ask(name, one) for name in ("two", "three")))
    return [one, *both, await team.ask("four", one, *both)]


async def history(team: Team) -> list[str]:
    """Give the messages of each agent's run to the next agent."""
    texts: list[str] = []
    messages: Any = None
    for name in ("one", "two", "three"):
        result = await team.agent(name).run(task(), message_history=messages)
        messages = result.all_messages()
        texts.append(str(result.output))
    return texts


async def delegation(team: Team) -> list[str]:
    async def ask_one(context: RunContext[Any], task: str) -> str:
        """Ask the first expert."""
        return str((await team.agent("one").run(task)).output)

    async def ask_two(context: RunContext[Any], task: str) -> str:
        """Ask the second expert."""
        return str((await team.agent("two").run(task)).output)

    return [str((await team.agent("boss", tools=[ask_one, ask_two]).run(task())).output)]


async def output_function(team: Team) -> list[str]:
    async def hand_over(task: str) -> str:
        """Hand over to the other agent."""
        return str((await team.agent("two").run(task)).output)

    first = await team.agent("one", output_type=[hand_over, str]).run(task())
    return [str(first.output), await team.ask("three", str(first.output))]


def hand_over(tools: bool) -> Script:
    from tests.coverage.answers import LOOK

    looked = [LOOK] if tools else []
    return Script({"one": [*looked, call("final_result_hand_over", task="Find a lake.")]})


PROGRAMS = team_programs(
    Team,
    ("agents called by code", chain),
    ("agents called by code, at once", fan),
    ("message_history", history),
    ("delegation by a tool", delegation, lambda _: ask_experts("ask_one", "ask_two")),
    ("output function", output_function, hand_over),
)
