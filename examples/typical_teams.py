"""Two typical teams for ``flashmoa plan``, which tells the time that linking saves on a GPU.

``build_handbooks`` is a chain of four agents. Each agent has a long handbook of its own.
``build_reviewers`` has five reviewers, who read a document at the same time, and an editor, who
reads the document and all reviews::

    flashmoa plan examples/typical_teams.py --team build_handbooks --output-tokens 200 \\
        --gpu h200_sxm --model Qwen/Qwen3-32B
"""

from __future__ import annotations

from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat
from autogen_core.models import ChatCompletionClient

TASK = "Prepare a three day trip to Nepal for two people who like walking and food."
TEXTS = Path(__file__).parent
GUIDE = (TEXTS / "guides" / "nepal.md").read_text()
PAPER = (TEXTS / "papers" / "handoffs.md").read_text()


def build_handbooks(
    first: ChatCompletionClient, second: ChatCompletionClient
) -> RoundRobinGroupChat:
    """Build a chain of four agents, which take turns on two engines."""
    agents = [
        AssistantAgent(
            name,
            model_client=second if place % 2 else first,
            # The name comes first: no two handbooks have a common beginning.
            system_message=f"You are the {name}. Your handbook:\n{GUIDE}\n{PAPER}",
            model_client_stream=True,
        )
        for place, name in enumerate(("planner", "guide", "cook", "editor"))
    ]
    return RoundRobinGroupChat(agents, max_turns=len(agents))


def build_reviewers(first: ChatCompletionClient, second: ChatCompletionClient) -> GraphFlow:
    """Build five reviewers of a document on the first engine, and an editor on the second."""
    editor = AssistantAgent(
        "editor",
        model_client=second,
        system_message=f"Merge the reviews of this document:\n{GUIDE}\n",
        model_client_stream=True,
    )
    graph = DiGraphBuilder().add_node(editor)
    for subject in ("facts", "style", "safety", "prices", "routes"):
        reviewer = AssistantAgent(
            f"{subject}_reviewer",
            model_client=first,
            system_message=f"{GUIDE}\nReview the {subject} in this document.",
            model_client_stream=True,
        )
        graph.add_node(reviewer).add_edge(reviewer, editor)
    return GraphFlow([*graph.get_participants()], graph.build())
