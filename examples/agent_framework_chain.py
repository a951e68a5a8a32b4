"""Run a chain of Microsoft Agent Framework agents, linked: planner -> local -> summary.

python examples/agent_framework_chain.py [--engine http://HOST:30000 --model NAME]
"""

from __future__ import annotations

from agent_framework import Agent, Workflow
from agent_framework.orchestrations import SequentialBuilder
from engines import GUIDE, one_engine, one_engine_arguments, run_program

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.observe import Listener
from flashmoa.observe.events import CallFinished, ignore

TASK = "Plan three days in Nepal for two people who like walking and food."
ROLES = {
    "planner": "You propose a day by day plan, based on the guide above.",
    "local": "You improve the plan with places and activities from the guide.",
    "summary": "You merge the plan and every remark into one final plan.",
}


def chain(client: FlashMoAChatClient) -> Workflow:
    """Build the sequence of agents."""
    guide = GUIDE.read_text()[:4000]
    agents = [
        Agent(
            client,
            f"{guide}\n\n{role}",
            name=name,
            default_options={"temperature": 0, "max_tokens": 64},
        )
        for name, role in ROLES.items()
    ]
    return SequentialBuilder(participants=agents, output_from="all").build()


async def run(client: FlashMoAChatClient, linked: bool, listener: Listener = ignore) -> list[str]:
    """Run the chain, linked or not; return the agents' answers."""
    workflow = chain(client)
    if linked:
        link(workflow, listener=listener)  # This line is all it takes.
    result = await workflow.run(TASK)
    return [output.text for output in result.get_outputs()]


async def main() -> None:
    """Run the chain linked and unlinked, and print how the prompts were computed."""
    arguments = one_engine_arguments(__doc__)

    def show(event: object) -> None:
        if isinstance(event, CallFinished) and event.usage is not None:
            usage = event.usage
            status = usage.prompt_stream.status if usage.prompt_stream is not None else "no link"
            print(
                f"{event.agent}: {status}, {usage.streamed_tokens or 0} of {usage.prompt_tokens} "
                f"prompt tokens computed ahead, {usage.late_tokens} left\n  {event.text!r}"
            )

    async with (
        one_engine(arguments.engine) as url,
        FlashMoAChatClient(arguments.model, base_url=url) as client,
    ):
        texts = await run(client, linked=True, listener=show)
        same = await run(client, linked=False)
    print("The same unlinked:", same == texts)


if __name__ == "__main__":
    run_program(main)
