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

from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from flashmoa_bench import chain
from flashmoa_bench.duo import duo, duo_arguments, run_program
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient as Client

GUIDE = Path(__file__).parent / "guides" / "nepal.md"
DOCUMENTS = [GUIDE]
TASK = "Plan a three day trip to Nepal for two people who like walking and food."
ROLES = {
    "planner": "You propose a day by day plan for the traveller, based on the guide above.",
    "local": "You improve the plan with authentic local places and activities from the guide.",
    "language": "You point out where language or customs matter for this plan, and how to act.",
    "summary": "You merge the plan and every remark into one complete final travel plan.",
}
BEFORE_SUMMARY = list(ROLES)[:-1]


def build_team(small: Client, large: Client) -> RoundRobinGroupChat:
    """The four agents; only the last one runs on the large model."""
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
    parser = duo_arguments(__doc__, tokens=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path(".cache/chain.json"))
    arguments = parser.parse_args()
    console = Console()
    async with duo(arguments, DOCUMENTS, console) as (small, large):
        clients = [small, large]
        runs = await chain.measure(
            lambda: build_team(small, large), clients, TASK, arguments.repeats, console
        )
    result = chain.summarise(runs)
    console.print()
    chain.show(result, runs, console)
    chain.save(result, arguments.json)
    console.print(f"\nThe same as JSON: {arguments.json}")
    console.print("Next: source .venv/bin/activate; python examples/mapreduce.py")


if __name__ == "__main__":
    run_program(main)
