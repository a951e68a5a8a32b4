"""Run agents of Google's Agent Development Kit, linked: planner -> critic -> writer.

Needs `pip install 'flashmoa[adk]'`, and a running engine.

    python examples/adk_team.py --engine http://HOST:30000 --model NAME
"""

from __future__ import annotations

from engines import GUIDE, one_engine, one_engine_arguments, run_program
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.runners import InMemoryRunner
from google.genai import types
from planners import ROLES, TASK

from flashmoa.adk import FlashMoALlm, LinkPlugin


async def run(model: FlashMoALlm, plugins: list[LinkPlugin]) -> str:
    """Return what the writer writes."""
    settings = types.GenerateContentConfig(temperature=0)
    guide = GUIDE.read_text()
    agents = [
        LlmAgent(
            name=name,
            model=model,
            instruction=f"{guide}\n\n{role}",
            generate_content_config=settings,
        )
        for name, role in ROLES.items()
    ]
    team = SequentialAgent(name="team", sub_agents=agents)
    async with InMemoryRunner(agent=team, app_name="trip", plugins=plugins) as runner:
        events = await runner.run_debug(TASK, quiet=True)
    return "".join(part.text or "" for part in events[-1].content.parts)


async def main() -> None:
    """Run the team linked and unlinked, and print what the links have gained."""
    arguments = one_engine_arguments(__doc__)
    async with one_engine(arguments.engine) as url:
        model = FlashMoALlm(model=arguments.model, base_url=url, max_tokens=64)
        plugin = LinkPlugin()  # This and the model are all it takes.
        text = await run(model, [plugin])
        same = await run(model, [])
        await model.close()
    print(text)
    print(plugin)
    print("The same unlinked:", same == text)


if __name__ == "__main__":
    run_program(main)
