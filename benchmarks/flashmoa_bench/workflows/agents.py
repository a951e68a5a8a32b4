"""Build the agents of FlashAgents' three workflows: a chain, mapreduce and slides (§6.2, 6.3).

In ``examples/``, the same workflows are complete programs. This package is installed without the
examples, so it has its own agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import (
    AssistantAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    PerSourceFilter,
)
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat

from flashmoa import Answer, EngineClient, Text, Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient as Client

_DOCUMENTS = Path(__file__).parent / "documents"
GUIDE = _DOCUMENTS / "nepal.md"
PAPER = _DOCUMENTS / "handoffs.md"

TRIP = "Plan a three day trip to Nepal for two people who like walking and food."
TRAVEL_AGENTS = {
    "planner": "You propose a day by day plan for the traveller, based on the guide above.",
    "local": "You improve the plan with authentic local places and activities from the guide.",
    "language": "You point out where language or customs matter for this plan, and how to act.",
    "summary": "You merge the plan and every remark into one complete final travel plan.",
}

REVIEW = "Review the paper for a conference on machine learning systems."
REVIEWERS = {
    "novelty": "You review what is new in the paper above, and what has been known before.",
    "method": "You review how the paper above measures, and whether that supports its claims.",
    "clarity": "You review whether the paper above can be understood, and what it leaves out.",
}
META = "meta"
_META = "You weigh the reviews of the paper above against each other and recommend a decision."

# They use the large model.
LAST_AGENTS = ("summary", META)

SLIDES = 12
_LAYOUTS = ("Title and Content", "Section Header", "Content with Caption")
_ANALYST = f"You read papers and outline talks. The outline has {SLIDES} lines, one for each slide."
_WRITER = "You write slides of a talk about the paper above: a heading, then three points."
_DESIGNER = f"You choose the layout of each slide of a talk: {', '.join(_LAYOUTS)}."
# Even an untrained model's answers match these regular expressions.
_NUMBER = re.compile(r"\d+\. ")
_LINE = r"[^\x00-\x1f]{12,40}"
_OUTLINE = "".join(rf"{number}\. {_LINE}\n" for number in range(1, SLIDES + 1))
_SLIDE = rf"# [^\x00-\x1f]{{10,30}}\n(- {_LINE}\n){{3}}"
_CHOICES = "".join(rf"{number}\. ({'|'.join(_LAYOUTS)})\n" for number in range(1, SLIDES + 1))


def chain(client: Callable[[str], Client]) -> RoundRobinGroupChat:
    """Build a chain of four travel agents.

    Args:
        client: returns the client of an agent, by its name.
    """
    guide = GUIDE.read_text()
    agents: list[ChatAgent | Team] = [
        AssistantAgent(
            name,
            model_client=client(name),
            system_message=f"{guide}\n\n{role}",
            model_client_stream=True,  # Only a stream shows when the first token comes.
        )
        for name, role in TRAVEL_AGENTS.items()
    ]
    return RoundRobinGroupChat(agents, max_turns=len(agents))


def mapreduce(client: Callable[[str], Client], *, sequential: bool = False) -> GraphFlow:
    """Build a team of three reviewers and a meta-reviewer.

    Args:
        client: returns the client of an agent, by its name.
        sequential: whether the reviewers run one after another.
    """
    paper = PAPER.read_text()
    reviewers = [
        _filter_messages(_make_agent(name, client(name), f"{paper}\n\n{role}"), [])
        for name, role in REVIEWERS.items()
    ]
    meta = _make_agent(META, client(META), f"{paper}\n\n{_META}")
    reader = _filter_messages(meta, list(REVIEWERS))
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


def _make_agent(name: str, client: Client, prompt: str) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=prompt, model_client_stream=True)


def _filter_messages(agent: AssistantAgent, sources: Sequence[str]) -> MessageFilterAgent:
    """Show an agent the task, then one message of each source, always in this order.

    So the first review can stream into the meta-reviewer's prompt.
    """
    filters = [
        PerSourceFilter(source=source, position="last", count=1) for source in ("user", *sources)
    ]
    return MessageFilterAgent(agent.name, agent, MessageFilterConfig(per_source=filters))


async def slides(
    flow: Workflow, small: EngineClient, large: EngineClient, *, topic: str, eager: bool = False
) -> list[str]:
    """Write a talk about the paper: an outline, twelve slides at once, a layout for each.

    Args:
        eager: whether a slide begins when its point of the outline is complete. Frameworks wait for
            the whole outline.

    Returns: the slides' texts.
    """
    paper = PAPER.read_text()
    outline = flow.ask(
        _make_messages(f"{paper}\n\n{_ANALYST}", f"Outline a talk {topic}."),
        engine=small,
        name="analyst",
        **_make_sampling(_OUTLINE, 900),
    )
    points = [flow.text(f"point {number}") for number in range(1, SLIDES + 1)]
    answers = [
        flow.ask(
            _make_messages(f"{paper}\n\n{_WRITER}", f"Write the slide about this point: {point}"),
            engine=large,
            name=f"slide {number}",
            **_make_sampling(_SLIDE, 300),
        )
        for number, point in enumerate(points, 1)
    ]
    layouts = flow.ask(
        _make_messages(_DESIGNER, f"The outline:\n{outline}"),
        engine=small,
        name="designer",
        **_make_sampling(_CHOICES, 400),
    )
    await _split(outline, points, eager=eager)
    texts = [await answer for answer in answers]
    await layouts
    return texts


def _make_messages(system: str, task: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": task}]


def _make_sampling(pattern: str, tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "regex": pattern}


async def _split(outline: Answer, points: Sequence[Text], *, eager: bool) -> None:
    """Write each line of the outline, without its number, into its point as it arrives."""
    remaining, line = iter(points), ""
    point = next(remaining)
    async for piece in outline:
        *complete_lines, line = (line + piece).split("\n")
        for complete_line in complete_lines:
            _write_rest(point, complete_line)
            if eager:
                point.close()
            point = next(remaining, point)
        _write_rest(point, line)
    for point in points:
        point.close()


def _write_rest(point: Text, line: str) -> None:
    number = _NUMBER.match(line)
    if number is not None:
        point.write(line[number.end() :].removeprefix(point.written))
