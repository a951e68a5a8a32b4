"""Run a chain of four travel agents, linked: planner -> local -> language -> summary.

Each agent has its own sections of a travel guide in its prompt, and reads the earlier agents'
answers. They take turns on two engines: while an agent writes on one engine, the other engine
prefills the next agent's prompt, if the chain is linked.

Without arguments this serves a small real model, SmolLM2-135M-Instruct, on two real SGLang engines
on this machine's CPU, measures the chain unlinked, warmed and linked, and prints the last plan. Two
modes differ if the slowest run of the first is faster than the fastest run of the second. The exit
status is 1 if a text differs. On your own engines:

    python examples/chain.py --engine-a http://HOST:30000 --model-a NAME \\
                             --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from comparison import Comparison, measure
from engines import GUIDE, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.link.link import Ahead

TASK = "Plan a three day trip to Nepal for two people who like walking and food."
# Each agent's sections of the guide, and its task.
ROLES = {
    "planner": (
        ["Sample itineraries"],
        "You propose a day by day plan for the traveller, based on the guide above.",
    ),
    "local": (
        ["Kathmandu valley", "Trekking regions"],
        "You improve the plan with authentic local places and activities from the guide.",
    ),
    "language": (
        ["Customs and etiquette", "Language basics", "Health and altitude safety"],
        "You point out where language or customs matter for this plan, and how to act.",
    ),
    "summary": (
        ["Food and drink", "Getting around", "Visas and money", "Pokhara and the lakes"],
        "You merge the plan and every remark into one complete final travel plan.",
    ),
}
# The text that is prefilled ahead of requests: ``link(team, ahead=...)``, by default ``text``.
MODES: dict[str, Ahead] = {
    "unlinked": "nothing",  # Only reports events, for the comparison.
    "warmed": "known",  # Prefills only the part known beforehand.
    "linked": "text",
}


def build_team(
    first: FlashMoAChatCompletionClient, second: FlashMoAChatCompletionClient
) -> RoundRobinGroupChat:
    """Build the team of four agents, which take turns on the two engines."""
    sections = {part.splitlines()[0]: part for part in GUIDE.read_text().split("\n## ")[1:]}
    agents = [
        AssistantAgent(
            name,
            model_client=second if place % 2 else first,
            system_message="\n\n".join([*(sections[title] for title in titles), role]),
            model_client_stream=True,  # When its first token comes is seen in a stream alone.
        )
        for place, (name, (titles, role)) in enumerate(ROLES.items())
    ]
    return RoundRobinGroupChat(agents, max_turns=len(agents))


async def main() -> None:
    """Measure the chain in every mode, and print and save the comparison."""
    parser = two_engine_parser(__doc__, tokens=40)
    parser.add_argument("--repeats", type=int, default=3, help="most rounds of each mode")
    parser.add_argument("--minutes", type=float, default=4, help="most time for the comparison")
    parser.add_argument("--json", type=Path, default=Path(".cache/chain.json"))
    arguments = parser.parse_args()
    console = Console()
    async with two_engines(arguments, GUIDE, console, real=True) as urls:
        runs = await measure(build_team, urls, TASK, MODES, arguments, console)
    comparison = Comparison(runs)
    console.print()
    comparison.show(console)
    console.print(f"\n[bold]The plan[/]\n{runs[-1].texts[-1]}", highlight=False)
    comparison.save(arguments.json)
    console.print(f"\nThe same as JSON: {arguments.json}")
    console.print("Next: source .venv/bin/activate; python examples/mapreduce.py")
    if not comparison.same_text:
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
