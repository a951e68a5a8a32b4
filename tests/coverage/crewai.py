"""Programs of CrewAI: sequential and hierarchical crews, tasks at once, and a flow."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ |= {"OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true"}
with warnings.catch_warnings(action="ignore"):
    import crewai
    from crewai.flow.flow import Flow, listen, start
    from crewai.tools import tool

from flashmoa.openai import instrument
from tests.coverage.measure import instructions, learned, look, task


@tool("look")
def look_blocking(place: str) -> str:
    """Look at a place."""
    import asyncio

    return asyncio.run(look(place))


class Team:
    """Makes agents that share a model, and their tasks."""

    def __init__(self, url: str, tools: bool) -> None:
        model: Any = crewai.LLM("openai/tiny", base_url=f"{url}/v1", api_key="none")
        self.model = instrument(model).client
        self._tools: list[Any] = [look_blocking] if tools else []

    def agent(self, name: str, **more: Any) -> Any:
        return crewai.Agent(
            role=name, goal="Plan.", backstory=instructions(name), llm=self.model,
            tools=self._tools, **more,
        )  # fmt: skip

    def task(self, name: str, *context: Any, agent: Any = None, **more: Any) -> Any:
        return crewai.Task(
            description=task(), expected_output="A text.", agent=agent or self.agent(name),
            context=[*context], **more,
        )  # fmt: skip

    def run(self, *tasks: Any, **more: Any) -> list[str]:
        members = [task.agent for task in tasks if task.agent is not None]
        crew = crewai.Crew(agents=members, tasks=[*tasks], **more)
        return [each.raw for each in crew.kickoff().tasks_output]


def sequential(team: Team) -> list[str]:
    one = team.task("one")
    two = team.task("two", one)
    return team.run(one, two, team.task("three", one, two))


def at_once(team: Team) -> list[str]:
    one = team.task("one")
    both = [team.task(name, one, async_execution=True) for name in ("two", "three")]
    return team.run(one, *both, team.task("four", one, *both))


def flow(team: Team) -> list[str]:
    class Plan(Flow[Any]):
        @start()
        async def first(self) -> str:
            return (await team.agent("one").kickoff_async(task())).raw

        @listen(first)
        async def second(self, text: str) -> str:
            return (await team.agent("two").kickoff_async(f"Check:\n{text}")).raw

        @listen(second)
        async def third(self, text: str) -> str:
            return (await team.agent("three").kickoff_async(f"Sum up:\n{text}")).raw

    return [str(Plan(suppress_flow_events=True).kickoff())]


def program(composition: str, tools: bool, work: Any) -> Any:
    def play(url: str) -> list[str]:
        team = Team(url, tools)
        try:
            return work(team)
        finally:
            team.model._client.close()

    return learned(composition, tools, play)


PROGRAMS = [
    program(name, tools, work)
    for name, work in [
        ("Process.sequential", sequential),
        ("async_execution", at_once),
        ("Flow", flow),
    ]
    for tools in (False, True)
]
