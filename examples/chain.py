"""A chain of four travel agents, linked: planner -> local -> language -> summary.

The first three run on engine A, the summary on a larger engine B. Each has a destination
guide of some 2,500 tokens in its prompt, so B has much to prefill before its first token;
linked, it does so while the agents before it are still writing.

Without arguments this makes two tiny models, starts two real SGLang engines on this machine's
CPU and measures the chain unlinked, warmed and linked. What tiny models with random weights
say is noise; the timing is real. On your own engines:

    python examples/chain.py --engine-a http://HOST:30000 --model-a NAME \\
                             --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from comparison import Comparison, measure
from engines import GUIDE, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient, link, watch

TASK = "Plan a three day trip to Nepal for two people who like walking and food."
ROLES = {
    "planner": "You propose a day by day plan for the traveller, based on the guide above.",
    "local": "You improve the plan with authentic local places and activities from the guide.",
    "language": "You point out where language or customs matter for this plan, and how to act.",
    "summary": "You merge the plan and every remark into one complete final travel plan.",
}
# What is done to a team before it runs; ``link(team)`` is the one line that links it.
MODES = {
    "unlinked": watch,  # Only tells what happens, to have something to compare with.
    "warmed": partial(link, stream=False),  # Only what is known beforehand is prefilled.
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
    """Measure the chain in every mode, and print what each took."""
    parser = two_engine_parser(__doc__, tokens=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path(".cache/chain.json"))
    arguments = parser.parse_args()
    console = Console()
    # Answers of a fixed length at temperature 0, so that runs can be compared token for token.
    fixed = {
        "temperature": 0,
        "max_tokens": arguments.tokens,
        "extra_body": {"ignore_eos": True},
    }
    async with two_engines(arguments, GUIDE, console) as (url_a, url_b):
        small = FlashMoAChatCompletionClient(model=arguments.model_a, base_url=url_a, **fixed)
        large = FlashMoAChatCompletionClient(model=arguments.model_b, base_url=url_b, **fixed)
        try:
            runs = await measure(
                lambda: build_team(small, large),
                [small, large],
                TASK,
                MODES,
                arguments.repeats,
                console,
            )
        finally:
            await small.close()
            await large.close()
    comparison = Comparison(runs)
    console.print()
    comparison.show(console)
    comparison.save(arguments.json)
    console.print(f"\nThe same as JSON: {arguments.json}")
    console.print("Next: source .venv/bin/activate; python examples/mapreduce.py")


if __name__ == "__main__":
    run_program(main)
