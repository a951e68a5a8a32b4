"""Programs of OpenAI's Agents SDK: code between agents, handoffs, and agents as tools."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
from agents import Agent, Runner, function_tool

from flashmoa.openai import AsyncOpenAI
from tests.coverage.answers import LOOK, Script, ask_experts, call
from tests.coverage.measure import instructions, look, task, team_programs

agents.set_tracing_disabled(True)


class Team:
    """Makes agents that share a client, and runs them."""

    def __init__(self, url: str, tools: bool) -> None:
        self.client = AsyncOpenAI(base_url=url)
        self._tools = [function_tool(look)] if tools else []

    def agent(self, name: str, **more: Any) -> Agent[Any]:
        model = agents.OpenAIChatCompletionsModel("tiny", self.client)
        more["tools"] = [*self._tools, *more.get("tools", [])]
        return Agent(name, instructions=instructions(name), model=model, **more)

    async def ask(self, agent: Agent[Any], *texts: str) -> str:
        return str((await Runner.run(agent, "\n\n".join([task(), *texts]))).final_output)


async def chain(team: Team) -> list[str]:
    one = await team.ask(team.agent("one"))
    two = await team.ask(team.agent("two"), one)
    return [one, two, await team.ask(team.agent("three"), one, two)]


async def fan(team: Team) -> list[str]:
    one = await team.ask(team.agent("one"))
    both = await asyncio.gather(*(team.ask(team.agent(name), one) for name in ("two", "three")))
    return [one, *both, await team.ask(team.agent("four"), one, *both)]


async def streamed(team: Team) -> list[str]:
    texts: list[str] = []
    for name in ("one", "two", "three"):
        result = Runner.run_streamed(team.agent(name), "\n\n".join([task(), *texts]))
        async for _ in result.stream_events():
            pass
        texts.append(str(result.final_output))
    return texts


async def conversation(team: Team) -> list[str]:
    """Give the items of each agent's run to the next agent."""
    items: Any = task()
    for name in ("one", "two", "three"):
        result = await Runner.run(team.agent(name), items)
        items = [*result.to_input_list(), {"role": "user", "content": "Go on."}]
    return [str(result.final_output)]


async def handoffs(team: Team) -> list[str]:
    three = team.agent("three")
    two = team.agent("two", handoffs=[three])
    return [await team.ask(team.agent("one", handoffs=[two]))]


async def as_tools(team: Team) -> list[str]:
    experts = [team.agent(name).as_tool(f"ask_{name}", "Ask.") for name in ("one", "two")]
    boss = Agent(
        "boss", instructions=instructions("boss"), tools=list(experts), model=team.agent("-").model
    )
    return [await team.ask(boss)]


def hand_off(tools: bool) -> Script:
    looked = [LOOK] if tools else []
    return Script({
        "one": [*looked, call("transfer_to_two")],
        "two": [*looked, call("transfer_to_three")],
        "three": looked,
    })  # fmt: skip


PROGRAMS = team_programs(
    Team,
    ("agents called by code", chain),
    ("agents called by code, at once", fan),
    ("run_streamed", streamed),
    ("to_input_list", conversation),
    ("handoffs", handoffs, hand_off),
    ("Agent.as_tool", as_tools, lambda _: ask_experts("ask_one", "ask_two", argument="input")),
)
