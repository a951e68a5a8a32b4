"""Three reviewers read one paper, a meta-reviewer weighs their reviews; linked.

The reviewers run side by side on engine A, the meta-reviewer on a larger engine B. Its prompt
begins with the same paper and ends with the reviews: linked, it has read the paper and most of
the reviews when the last reviewer is done.

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
from comparison import run_once
from engines import PAPER, run_program, two_engine_parser, two_engines
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient, link, watch
from flashmoa.observe.timeline import draw, lanes

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
        _filtered(AssistantAgent(name, small, system_message=f"{paper}\n\n{role}"), [])
        for name, role in REVIEWERS.items()
    ]
    meta = AssistantAgent("meta", large, system_message=f"{paper}\n\n{META}")
    reader = _filtered(meta, list(REVIEWERS))
    graph = DiGraphBuilder()
    for agent in (*reviewers, reader):
        graph.add_node(agent)
    for agent in reviewers:
        graph.add_edge(agent, reader)
    return GraphFlow([*reviewers, reader], graph=graph.build())


def _filtered(agent: AssistantAgent, sources: Sequence[str]) -> MessageFilterAgent:
    """Show an agent the task, then one message of each source, always in this order.

    The first review can then flow into the meta-reviewer's prompt as it is written.
    """
    filters = [PerSourceFilter(source=one, position="last", count=1) for one in ("user", *sources)]
    return MessageFilterAgent(agent.name, agent, MessageFilterConfig(per_source=filters))


async def main() -> None:
    """Review the paper unlinked and linked, and draw when each agent did what."""
    arguments = two_engine_parser(__doc__, tokens=64).parse_args()
    console = Console()
    # Answers of a fixed length at temperature 0, so that both runs can be compared.
    fixed = {
        "temperature": 0,
        "max_tokens": arguments.tokens,
        "extra_body": {"ignore_eos": True},
    }
    async with two_engines(arguments, PAPER, console) as (url_a, url_b):
        small = FlashMoAChatCompletionClient(model=arguments.model_a, base_url=url_a, **fixed)
        large = FlashMoAChatCompletionClient(model=arguments.model_b, base_url=url_b, **fixed)
        for mode, attach in {"unlinked": watch, "linked": link}.items():
            with console.status(f"reviewing, {mode}"):
                team = build_team(small, large)
                run = await run_once(team, [small, large], TASK, mode, attach)
            console.print(f"[bold]{mode}[/] ({run.seconds:.2f} s)")
            console.print(draw(lanes(run.events), min(console.width, 110)), markup=False)
        await small.close()
        await large.close()
    console.print(f"\nThe decision:\n{run.texts[-1]}", markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
