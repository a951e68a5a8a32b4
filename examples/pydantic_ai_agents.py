"""Run agents of Pydantic AI one after the other, linked: planner -> critic -> writer.

The first run is watched. In later ones each agent's text is streamed into the prompts of the agents
that will read it. Needs `pip install 'pydantic-ai-slim[openai]'`, and a running engine.

    python examples/pydantic_ai_agents.py --engine http://HOST:30000 --model NAME
"""

from __future__ import annotations

from engines import one_engine, one_engine_arguments, run_program
from planners import plan
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from flashmoa.openai import AsyncOpenAI, run


async def main() -> None:
    """Plan twice linked, and once unlinked."""
    arguments = one_engine_arguments(__doc__)
    async with one_engine(arguments.engine) as url, AsyncOpenAI(base_url=url) as client:
        model = OpenAIChatModel(arguments.model, provider=OpenAIProvider(openai_client=client))

        async def ask(name: str, instructions: str, text: str) -> str:
            agent = Agent(model, name=name, instructions=instructions)
            settings = {"temperature": 0, "max_tokens": 64}
            return (await agent.run(text, model_settings=settings)).output  # type: ignore[arg-type]

        text = ""
        for _ in range(2):
            async with run("plan", listener=print):  # The one line.
                text = await plan(ask)
        same = await plan(ask)
    print(text)
    print("The same unlinked:", same == text)


if __name__ == "__main__":
    run_program(main)
