"""Run a chain of four travel agents, linked: planner -> local -> language -> summary.

The first three agents run on engine A, the summary on engine B with a larger model. Each agent has
a destination guide of some 2,500 tokens in its prompt, so B has much to prefill before its first
token. If the chain is linked, B does so while the agents before it are still writing.

Without arguments this makes two tiny models, starts two real SGLang engines on this machine's
CPU and measures the chain unlinked, warmed and linked. Tiny models with random weights write
noise, but the timing is real. On your own engines:

    python examples/chain.py --engine-a http://HOST:30000 --model-a NAME \\
                             --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from comparison import Comparison, measure, two_clients
from engines import GUIDE, run_program, two_engine_parser
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient, link, watch

TASK = "Plan a three day trip to Nepal for two people who like walking and food."
ROLES = {
    "planner": "You propose a day by day plan for the traveller, based on the guide above.",
    "local": "You improve the plan with authentic local places and activities from the guide.",
    "language": "You point out where language or customs matter for this plan, and how to act.",
    "summary": "You merge the plan and every remark into one complete final travel plan.",
}
# The function that is called with a team before it runs. ``link(team)`` is all it takes to link it.
MODES = {
    "unlinked": watch,  # Only reports events, for the comparison.
    "warmed": partial(link, stream=False),  # Prefills only the part known beforehand.
    "linked": link,
}


def build_team(
    small: FlashMoAChatCompletionClient, large: FlashMoAChatCompletionClient
) -> RoundRobinGroupChat:
    """Build the team of four agents; only the last one runs on the large model."""
    guide = GUIDE.read_text()
    agents = [
        AssistantAgent(
            name,
            model_client=large if name == "summary" else small,
            system_message=f"{guide}\n\n{role}",
        )
        for name, role in ROLES.items()
    ]
    return RoundRobinGroupChat(agents, max_turns=len(agents))


async def main() -> None:
    """Measure the chain in every mode, and print and save the comparison."""
    parser = two_engine_parser(__doc__, tokens=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path(".cache/chain.json"))
    arguments = parser.parse_args()
    console = Console()
    async with two_clients(arguments, GUIDE, console) as (small, large):
        runs = await measure(
            lambda: build_team(small, large),
            [small, large],
            TASK,
            MODES,
            arguments.repeats,
            console,
        )
    comparison = Comparison(runs)
    console.print()
    comparison.show(console)
    comparison.save(arguments.json)
    console.print(f"\nThe same as JSON: {arguments.json}")
    console.print("Next: source .venv/bin/activate; python examples/mapreduce.py")


if __name__ == "__main__":
    run_program(main)
