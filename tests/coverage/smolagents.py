"""Programs of smolagents: code between agents, and managed agents."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import smolagents

from flashmoa.openai import instrument
from tests.coverage.answers import LOOK, Script, call
from tests.coverage.measure import instructions, learned, look, task


class Look(smolagents.Tool):
    """Looks at a place."""

    name = "look"
    description = "Look at a place."
    inputs = {"place": {"type": "string", "description": "The place."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, place: str) -> str:
        return asyncio.run(look(place))


class Team:
    """Makes agents that share a model."""

    def __init__(self, url: str, tools: bool) -> None:
        self.model: Any = smolagents.OpenAIModel("tiny", api_base=f"{url}/v1", api_key="none")
        instrument(self.model)
        self._tools: list[Any] = [Look()] if tools else []

    def agent(self, name: str, **more: Any) -> Any:
        return smolagents.ToolCallingAgent(
            self._tools, self.model, instructions=instructions(name), name=name,
            description="An expert.", verbosity_level=0, **more,
        )  # fmt: skip


def chain(team: Team) -> list[str]:
    texts: list[str] = []
    for name in ("one", "two", "three"):
        texts.append(str(team.agent(name, max_steps=3).run("\n\n".join([task(), *texts]))))
    return texts


def managed(team: Team) -> list[str]:
    experts = [team.agent(name, max_steps=3) for name in ("one", "two")]
    boss = smolagents.ToolCallingAgent(
        [], team.model, instructions=instructions("boss"), managed_agents=experts, max_steps=4,
        verbosity_level=0,
    )  # fmt: skip
    return [str(boss.run(task()))]


def final_answer() -> str:
    """Return the call of the tool that ends an agent's run."""
    return call("final_answer", answer=f"{task()} Walk to the lake. " * 8)


def answer(tools: bool) -> Script:
    steps = [*([LOOK] if tools else []), final_answer()]
    return Script(dict.fromkeys(("one", "two", "three"), steps))


def ask_experts(tools: bool) -> Script:
    steps = [*([LOOK] if tools else []), final_answer()]
    asked = [call("one", task="Find a lake."), call("two", task="Find a hill."), final_answer()]
    return Script({"boss": asked, "one": steps, "two": steps})


def program(composition: str, tools: bool, work: Any, script: Any) -> Any:
    def play(url: str) -> list[str]:
        team = Team(url, tools)
        try:
            return work(team)
        finally:
            team.model.client.close()

    return learned(composition, tools, play, make_script=partial(script, tools))


PROGRAMS = [
    program(name, tools, *rest)
    for name, *rest in [
        ("agents called by code", chain, answer),
        ("managed_agents", managed, ask_experts),
    ]
    for tools in (False, True)
]
