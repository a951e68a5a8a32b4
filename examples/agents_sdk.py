"""Run agents of OpenAI's Agents SDK one after the other, linked: planner -> critic -> writer.

The first run is watched. In later ones each agent's text is streamed into the prompts of the agents
that will read it. Needs `pip install openai-agents`, and a running engine.

    python examples/agents_sdk.py --engine http://HOST:30000 --model NAME
"""

from __future__ import annotations

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from engines import one_engine, one_engine_arguments, run_program
from planners import plan

from flashmoa.openai import AsyncOpenAI, run


async def main() -> None:
    """Plan twice linked, and once unlinked."""
    set_tracing_disabled(True)  # The SDK would send its traces to OpenAI.
    arguments = one_engine_arguments(__doc__)
    async with one_engine(arguments.engine) as url, AsyncOpenAI(base_url=url) as client:
        model = OpenAIChatCompletionsModel(arguments.model, client)
        settings = ModelSettings(temperature=0, max_tokens=64)

        async def ask(name: str, instructions: str, text: str) -> str:
            agent = Agent(name, instructions=instructions, model=model, model_settings=settings)
            return str((await Runner.run(agent, text)).final_output)

        text = ""
        for _ in range(2):
            async with run("plan", listener=print):  # The one line.
                text = await plan(ask)
        same = await plan(ask)
    print(text)
    print("The same unlinked:", same == text)


if __name__ == "__main__":
    run_program(main)
