"""Programs of LlamaIndex: code between agents, handoffs, and agents as tools."""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from flashmoa.openai import AsyncOpenAI
from tests.coverage.answers import LOOK, Script, ask_experts, call
from tests.coverage.measure import instructions, look, task, team_programs


class Team:
    """Makes agents that share a client."""

    def __init__(self, url: str, tools: bool) -> None:
        self.client = AsyncOpenAI(base_url=url)
        self._model = OpenAILike(
            model="tiny", is_chat_model=True, is_function_calling_model=True,
            async_openai_client=self.client,
        )  # fmt: skip
        self._tools: list[Any] = [look] if tools else []

    def agent(self, name: str, tools: Any = None, **more: Any) -> FunctionAgent:
        return FunctionAgent(
            name=name, description="An expert.", system_prompt=instructions(name),
            llm=self._model, tools=self._tools if tools is None else tools, **more,
        )  # fmt: skip

    async def ask(self, name: str, *texts: str) -> str:
        return str(await self.agent(name).run(user_msg="\n\n".join([task(), *texts])))


async def chain(team: Team) -> list[str]:
    one = await team.ask("one")
    two = await team.ask("two", one)
    return [one, two, await team.ask("three", one, two)]


async def handoffs(team: Team) -> list[str]:
    members = [
        team.agent("one", can_handoff_to=["two"]), team.agent("two", can_handoff_to=["three"]),
        team.agent("three", can_handoff_to=[]),
    ]  # fmt: skip
    return [str(await AgentWorkflow(agents=members, root_agent="one").run(user_msg=task()))]


async def as_tools(team: Team) -> list[str]:
    async def ask_one(task: str) -> str:
        """Ask the first expert."""
        return await team.ask("one", task)

    async def ask_two(task: str) -> str:
        """Ask the second expert."""
        return await team.ask("two", task)

    return [str(await team.agent("boss", [ask_one, ask_two]).run(user_msg=task()))]


def hand_off(tools: bool) -> Script:
    looked = [LOOK] if tools else []
    return Script({
        "one": [*looked, call("handoff", to_agent="two", reason="so")],
        "two": [*looked, call("handoff", to_agent="three", reason="so")],
        "three": looked,
    })  # fmt: skip


PROGRAMS = team_programs(
    Team,
    ("agents called by code", chain),
    ("AgentWorkflow, handoffs", handoffs, hand_off),
    ("agents as tools", as_tools, lambda _: ask_experts("ask_one", "ask_two")),
)
