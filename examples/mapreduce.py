"""Run three reviewers of a paper and a meta-reviewer who weighs their reviews, linked.

The reviewers run at the same time on engine A, the meta-reviewer on engine B with a larger model.
Its prompt begins with the same paper and ends with the reviews. If the team is linked, most of the
prompt is prefilled when the last reviewer has finished.

Without arguments this starts two tiny models on this machine's CPU. On your own engines:

    python examples/mapreduce.py --engine-a http://HOST:30000 --model-a NAME \\
                                 --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

from collections.abc import Sequence

from autogen_agentchat.agents import (
    AssistantAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    PerSourceFilter,
)
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from comparison import run_once, two_clients
from engines import PAPER, print_timeline, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.link.link import Ahead

TASK = "Review the paper for a conference on machine learning systems."
REVIEWERS = {
    "novelty": "You review what is new in the paper above, and what has been known before.",
    "method": "You review how the paper above measures, and whether that supports its claims.",
    "clarity": "You review whether the paper above can be understood, and what it leaves out.",
}
META = "You weigh the reviews of the paper above against each other and recommend a decision."


def build_team(
    small: FlashMoAChatCompletionClient, large: FlashMoAChatCompletionClient
) -> GraphFlow:
    """Build the team of four agents; only the meta-reviewer runs on the large model."""
    paper = PAPER.read_text()
    reviewers = [
        _filter_messages(_make_agent(name, small, f"{paper}\n\n{role}"), [])
        for name, role in REVIEWERS.items()
    ]
    meta = _make_agent("meta", large, f"{paper}\n\n{META}")
    reader = _filter_messages(meta, list(REVIEWERS))
    graph = DiGraphBuilder()
    for agent in (*reviewers, reader):
        graph.add_node(agent)
    for agent in reviewers:
        graph.add_edge(agent, reader)
    return GraphFlow([*reviewers, reader], graph=graph.build())


def _make_agent(name: str, client: FlashMoAChatCompletionClient, prompt: str) -> AssistantAgent:
    # When the first token of an answer comes is seen in a stream alone.
    return AssistantAgent(name, client, system_message=prompt, model_client_stream=True)


def _filter_messages(agent: AssistantAgent, sources: Sequence[str]) -> MessageFilterAgent:
    """Show an agent the task, then one message of each source, always in this order.

    The first review can then be streamed into the meta-reviewer's prompt while it is written.
    """
    filters = [
        PerSourceFilter(source=source, position="last", count=1) for source in ("user", *sources)
    ]
    return MessageFilterAgent(agent.name, agent, MessageFilterConfig(per_source=filters))


async def main() -> None:
    """Review the paper unlinked and linked, and print both timelines."""
    arguments = two_engine_parser(__doc__, tokens=64).parse_args()
    console = Console()
    async with (
        two_engines(arguments, PAPER, console) as urls,
        two_clients(arguments, urls, arguments.tokens) as (small, large),
    ):
        modes: dict[str, Ahead] = {"unlinked": "nothing", "linked": "text"}
        for mode, ahead in modes.items():
            with console.status(f"reviewing, {mode}"):
                team = build_team(small, large)
                run = await run_once(team, [small, large], TASK, mode, ahead)
            console.print(f"[bold]{mode}[/] ({run.seconds:.2f} s)")
            print_timeline(run.events, console)
    console.print(f"\nThe decision:\n{run.texts[-1]}", markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
