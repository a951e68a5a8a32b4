"""Run agents of OpenAI's Agents SDK one after the other, linked: planner -> critic -> writer.

The first run is watched. In later ones each agent's text is streamed into the prompts of the agents
that will read it. Needs `pip install openai-agents`, and a running engine.

    python examples/agents_sdk.py --engine http://HOST:30000 --model NAME
"""

from __future__ import annotations

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from engines import GUIDE, one_engine, one_engine_arguments, run_program

from flashmoa.openai import AsyncOpenAI, run

ROLES = {
    "planner": "You propose a plan from the guide above.",
    "critic": "You say what is wrong with plans.",
    "writer": "You write the final plan.",
}


async def plan(model: OpenAIChatCompletionsModel, task: str) -> str:
    """Return the writer's plan; each agent reads what those before it wrote."""
    guide, text = GUIDE.read_text(), task
    for name, role in ROLES.items():
        agent = Agent(
            name=name,
            instructions=f"{guide}\n\n{role}",
            model=model,
            model_settings=ModelSettings(temperature=0, max_tokens=64),
        )
        answer = await Runner.run(agent, text)
        text = f"{text}\n\n{name}: {answer.final_output}"
    return text


async def main() -> None:
    """Plan twice linked, and once unlinked."""
    set_tracing_disabled(True)  # The SDK would send its traces to OpenAI.
    arguments = one_engine_arguments(__doc__)
    task = "Plan three days in Nepal for two people."
    async with one_engine(arguments.engine) as url, AsyncOpenAI(base_url=url) as client:
        model = OpenAIChatCompletionsModel(arguments.model, client)
        text = ""
        for _ in range(2):
            async with run("plan", listener=print):  # The one line.
                text = await plan(model, task)
        same = await plan(model, task)
    print(text)
    print("The same unlinked:", same == text)


if __name__ == "__main__":
    run_program(main)
