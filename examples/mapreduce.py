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
from pathlib import Path

from autogen_agentchat.agents import (
    AssistantAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    PerSourceFilter,
)
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from flashmoa_bench.duo import duo, duo_arguments, run_program
from flashmoa_bench.runs import run_once
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient as Client
from flashmoa.observe.timeline import draw, lanes

PAPER = Path(__file__).parent / "papers" / "handoffs.md"
DOCUMENTS = [PAPER]
TASK = "Review the paper for a conference on machine learning systems."
REVIEWERS = {
    "novelty": "You review what is new in the paper above, and what has been known before.",
    "method": "You review how the paper above measures, and whether that supports its claims.",
    "clarity": "You review whether the paper above can be understood, and what it leaves out.",
}
META = "You weigh the reviews of the paper above against each other and recommend a decision."


def build_team(small: Client, large: Client, *, sequential: bool = False) -> GraphFlow:
    """The four agents. ``sequential``: the reviewers one after the other, to compare with."""
    paper = PAPER.read_text()
    reviewers = [
        _reading(AssistantAgent(name, small, system_message=f"{paper}\n\n{role}"), [])
        for name, role in REVIEWERS.items()
    ]
    meta = AssistantAgent("meta", large, system_message=f"{paper}\n\n{META}")
    reader = _reading(meta, list(REVIEWERS))
    graph = DiGraphBuilder()
    for agent in (*reviewers, reader):
        graph.add_node(agent)
    if sequential:
        for agent, after in zip(reviewers, [*reviewers[1:], reader], strict=True):
            graph.add_edge(agent, after)
    else:
        for agent in reviewers:
            graph.add_edge(agent, reader)
    return GraphFlow([*reviewers, reader], graph=graph.build())


def _reading(agent: AssistantAgent, sources: Sequence[str]) -> MessageFilterAgent:
    """The task, then one message of each source, always in this order: so the first review
    can flow into the meta-reviewer's prompt as it is written."""
    filters = [PerSourceFilter(source=one, position="last", count=1) for one in ("user", *sources)]
    return MessageFilterAgent(agent.name, agent, MessageFilterConfig(per_source=filters))


async def main() -> None:
    arguments = duo_arguments(__doc__, tokens=64).parse_args()
    console = Console()
    async with duo(arguments, DOCUMENTS, console) as (small, large):
        for mode in ("unlinked", "linked"):
            with console.status(f"reviewing, {mode}"):
                run = await run_once(lambda: build_team(small, large), [small, large], TASK, mode)
            console.print(f"[bold]{mode}[/] ({run.seconds:.2f} s)")
            console.print(draw(lanes(run.events), min(console.width, 110)), markup=False)
    console.print(f"\nThe decision:\n{run.texts[-1]}", markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
