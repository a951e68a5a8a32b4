"""Run a chain of four travel agents, linked: planner -> local -> language -> summary.

The first three agents run on engine A, the summary on engine B, and each has a destination guide in
its prompt. If the chain is linked, an agent's engine prefills its prompt while the agents before it
are still writing.

Without arguments this serves a small real model, SmolLM2-135M-Instruct, on two real SGLang engines
on this machine's CPU, measures the chain unlinked, warmed and linked, and prints the last plan.
With `--tiny`, untrained models write noise instead, with the whole guide of some 2,500 tokens in
the prompts, so that there is more to prefill; `--repeats 5` gives medians. On your own engines:

    python examples/chain.py --engine-a http://HOST:30000 --model-a NAME \\
                             --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from comparison import Comparison, measure, two_clients
from engines import GUIDE, run_program, two_engine_parser
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.linking.link import Ahead

TASK = "Plan a three day trip to Nepal for two people who like walking and food."
ROLES = {
    "planner": "You propose a day by day plan for the traveller, based on the guide above.",
    "local": "You improve the plan with authentic local places and activities from the guide.",
    "language": "You point out where language or customs matter for this plan, and how to act.",
    "summary": "You merge the plan and every remark into one complete final travel plan.",
}
# What is prefilled ahead of requests: ``link(team, ahead=...)``, by default ``text``.
MODES: dict[str, Ahead] = {
    "unlinked": "nothing",  # Only reports events, for the comparison.
    "warmed": "known",  # Prefills only the part known beforehand.
    "linked": "text",
}


# As much of the guide as the small real model can use, in characters.
EXCERPT = 1500


def build_team(
    small: FlashMoAChatCompletionClient,
    large: FlashMoAChatCompletionClient,
    guide: str = GUIDE.read_text(),
) -> RoundRobinGroupChat:
    """Build the team of four agents; only the last one runs on the large model."""
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
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path(".cache/chain.json"))
    parser.add_argument("--tiny", action="store_true", help="untrained models, the whole guide")
    arguments = parser.parse_args()
    console = Console()
    guide = (
        GUIDE.read_text() if arguments.tiny or arguments.engine_a else GUIDE.read_text()[:EXCERPT]
    )
    async with two_clients(arguments, GUIDE, console, real=not arguments.tiny) as clients:
        runs = await measure(
            lambda: build_team(*clients, guide),
            clients,
            TASK,
            MODES,
            arguments.repeats,
            console,
        )
    comparison = Comparison(runs)
    console.print()
    comparison.show(console)
    console.print(f"\n[bold]The plan[/]\n{runs[-1].texts[-1]}", highlight=False)
    comparison.save(arguments.json)
    console.print(f"\nThe same as JSON: {arguments.json}")
    console.print("Next: source .venv/bin/activate; python examples/mapreduce.py")


if __name__ == "__main__":
    run_program(main)
