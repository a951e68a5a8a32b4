"""Test that crews of CrewAI answer the same linked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from flashmoa.openai import instrument
from tests.frameworks.blocking import TOKENS, check_linked
from tests.frameworks.conftest import URLS
from tests.integration.openai.programs import TASK

# Of its dependencies, and of how it loads parts of itself.
pytestmark = [
    pytest.mark.usefixtures("clients"),
    pytest.mark.filterwarnings("default"),
]

with warnings.catch_warnings(action="ignore"):
    import crewai


async def test_a_crew_answers_the_same_linked_and_its_calls_have_the_roles(guide: str) -> None:
    models: list[Any] = [
        crewai.LLM(
            "openai/tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=TOKENS
        )
        for url in URLS
    ]
    for model in models:
        instrument(model)

    def program() -> list[str]:
        writer, guide_, guest = (
            crewai.Agent(role=role, goal=goal, backstory=guide[:2000], llm=model)
            for role, goal, model in [
                ("writer", "write", models[0]),
                ("guide", "check facts", models[1]),
                ("guest", "find what is missing", models[1]),
            ]
        )
        plan = task(TASK, writer)
        reviews = [task("Review.", each, plan, async_execution=True) for each in (guide_, guest)]
        end = task("Improve the plan.", writer, plan, *reviews)
        crew = crewai.Crew(agents=[writer, guide_, guest], tasks=[plan, *reviews, end])
        return [each.raw for each in crew.kickoff().tasks_output]

    names = await check_linked("CrewAI", program)
    assert sorted(names) == ["guest", "guide", "writer", "writer (2)"]
    for model in models:
        model._client.close()


def task(description: str, agent: Any, *context: Any, **more: Any) -> Any:
    return crewai.Task(
        description=description, expected_output="A text.", agent=agent, context=[*context], **more
    )
