"""Run agents of Pydantic AI one after the other, linked: planner -> critic -> writer.

The first run is watched. In later ones each agent's text is streamed into the prompts of the agents
that will read it. Needs `pip install 'pydantic-ai-slim[openai]'`, and a running engine.

    python examples/pydantic_ai_agents.py --engine http://HOST:30000 --model NAME
"""

from __future__ import annotations

from engines import GUIDE, one_engine, one_engine_arguments, run_program
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from flashmoa.openai import AsyncOpenAI, run

ROLES = {
    "planner": "You propose a plan from the guide above.",
    "critic": "You say what is wrong with plans.",
    "writer": "You write the final plan.",
}


async def plan(model: OpenAIChatModel, task: str) -> str:
    """Return the writer's plan; each agent reads what those before it wrote."""
    guide, text = GUIDE.read_text(), task
    for name, role in ROLES.items():
        agent = Agent(
            model,
            name=name,
            instructions=f"{guide}\n\n{role}",
            model_settings={"temperature": 0, "max_tokens": 64},
        )
        answer = await agent.run(text)
        text = f"{text}\n\n{name}: {answer.output}"
    return text


async def main() -> None:
    """Plan twice linked, and once unlinked."""
    arguments = one_engine_arguments(__doc__)
    task = "Plan three days in Nepal for two people."
    async with one_engine(arguments.engine) as url, AsyncOpenAI(base_url=url) as client:
        model = OpenAIChatModel(arguments.model, provider=OpenAIProvider(openai_client=client))
        text = ""
        for _ in range(2):
            async with run("plan", listener=print):  # The one line.
                text = await plan(model, task)
        same = await plan(model, task)
    print(text)
    print("The same unlinked:", same == text)


if __name__ == "__main__":
    run_program(main)
