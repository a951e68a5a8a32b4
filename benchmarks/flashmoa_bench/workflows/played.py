"""Workflows played in several ways and several copies at once.

Figure 7 of FlashAgents has one number for what several techniques achieve together. Here each way
adds one of them to the way before it, so that they can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import anyio
from autogen_agentchat.teams import BaseGroupChat

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient, TeamLink, link, watch
from flashmoa.linking.link import Ahead
from flashmoa.observe import CallFinished, Event, Listener
from flashmoa_bench.workflows import agents

WorkflowWay = Literal["sequential", "unlinked", "shared", "warmed", "linked", "eager"]

WAYS: dict[WorkflowWay, str] = {
    "sequential": "stock SGLang, one agent at a time",
    "unlinked": "stock SGLang, agents side by side where they do not need each other",
    "shared": "the same with the plugin, no links: requests that share a prefix compute it once",
    "warmed": "what is known of a prompt is prefilled before its request comes",
    "linked": "the text of the agents before it, too, as they write it",
    "eager": "a slide is begun when its point of the outline is complete, not when all are",
}
STOCK: Collection[WorkflowWay] = ("sequential", "unlinked")
_AHEAD: dict[WorkflowWay, Ahead] = {
    "sequential": "nothing",
    "unlinked": "nothing",
    "shared": "nothing",
    "warmed": "known",
    "linked": "text",
    "eager": "text",
}


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of the small model's engine and of the larger one's."""

    small: FlashMoAChatCompletionClient
    large: FlashMoAChatCompletionClient

    async def flush(self) -> None:
        """Empty both engines' caches."""
        await self.small.engine.flush_cache()
        await self.large.engine.flush_cache()

    async def close(self) -> None:
        """Close both."""
        await self.small.close()
        await self.large.close()


def greedy_client(url: str, model: str, tokens: int) -> FlashMoAChatCompletionClient:
    """Make a client whose answers can be compared token for token.

    They have ``tokens`` tokens each, at temperature 0.
    """
    return FlashMoAChatCompletionClient(
        model=model,
        base_url=url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


@dataclass(frozen=True, slots=True)
class Played:
    """One copy of a workflow, played once.

    Attributes:
        seconds: from its start to its last token.
        response: from the last token that the last agents had to wait for to their own last one.
        texts: what the agents wrote, by their names.
    """

    seconds: float
    response: float
    texts: Mapping[str, str]


class AgentWorkflow(Protocol):
    """A workflow that can be played.

    Attributes:
        paper: FlashAgents' latency over that of its baseline, by number of copies.
        upstream: the agents that the last ones wait for.
    """

    name: str
    ways: tuple[WorkflowWay, ...]
    paper: Mapping[int, float]
    upstream: Collection[str]

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, tell: Listener) -> None:
        """Play copy number ``copy``, whose events ``tell`` is called with."""
        ...


class TeamWorkflow:
    """An AutoGen team as a workflow.

    Args:
        build: makes the team.
        one_by_one: makes the team with its agents one after the other, if they are not anyway.
    """

    def __init__(
        self,
        build: Callable[
            [FlashMoAChatCompletionClient, FlashMoAChatCompletionClient], BaseGroupChat
        ],
        task: str,
        upstream: Collection[str],
        paper: Mapping[int, float],
        one_by_one: Callable[..., BaseGroupChat] | None = None,
    ) -> None:
        self.name = build.__name__
        self.upstream = upstream
        self.paper = paper
        self._build = build
        self._one_by_one = one_by_one
        self._task = task
        rest: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked")
        self.ways: tuple[WorkflowWay, ...] = ("sequential", *rest) if one_by_one else rest

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, tell: Listener) -> None:
        """Play one copy; its task differs from that of the others."""
        build = self._one_by_one if way == "sequential" and self._one_by_one else self._build
        team = build(clients.small, clients.large)
        linked = attach(team, _AHEAD[way], tell)
        try:
            await team.run(task=f"{self._task} This is request {copy}.")
        finally:
            await linked.close()


def attach(team: BaseGroupChat, ahead: Ahead, listener: Listener) -> TeamLink:
    """Link a team, or only watch it where ``ahead`` is ``"nothing"``."""
    if ahead == "nothing":
        return watch(team, listener)
    return link(team, stream=ahead == "text", listener=listener)


class SlidesWorkflow:
    """Slides (FlashAgents §6.3), written with the plain API."""

    name = "pptagent"
    ways: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked", "eager")
    upstream: Collection[str] = ("analyst",)
    paper: Mapping[int, float] = {1: 0.759}

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, tell: Listener) -> None:
        """Play one copy; its topic differs from that of the others."""
        small, large = clients.small.engine, clients.large.engine
        async with Workflow(small, ahead=_AHEAD[way], listener=tell) as flow:
            topic = f"for engineers, number {copy}"
            await agents.slides(flow, small, large, topic=topic, eager=way == "eager")


def _sequential_mapreduce(
    small: FlashMoAChatCompletionClient, large: FlashMoAChatCompletionClient
) -> BaseGroupChat:
    return agents.mapreduce(small, large, sequential=True)


def agent_workflows() -> list[AgentWorkflow]:
    """Return those of FlashAgents §6.2 and 6.3, with the latencies of its Figure 7."""
    return [
        TeamWorkflow(
            agents.chain, agents.TRIP, list(agents.TRAVEL_AGENTS)[:-1], {1: 0.982, 8: 0.881}
        ),
        TeamWorkflow(
            agents.mapreduce,
            agents.REVIEW,
            list(agents.REVIEWERS),
            {1: 0.597, 8: 0.853},
            _sequential_mapreduce,
        ),
        SlidesWorkflow(),
    ]


async def play(
    workflow: AgentWorkflow, clients: Clients, way: WorkflowWay, copies: int
) -> list[Played]:
    """Play ``copies`` of a workflow at once, on empty caches."""
    await clients.flush()
    played: list[Played | None] = [None] * copies

    async def one(copy: int) -> None:
        events: list[Event] = []
        started = time.time()
        await workflow.run(clients, way, copy, events.append)
        played[copy] = _played(events, started, workflow.upstream)

    async with anyio.create_task_group() as group:
        for copy in range(copies):
            group.start_soon(one, copy)
    return [one for one in played if one is not None]


def _played(events: Sequence[Event], started: float, upstream: Collection[str]) -> Played:
    finished = [event for event in events if isinstance(event, CallFinished)]
    ended = max(event.at for event in finished)
    handed_over = max(event.at for event in finished if event.agent in upstream)
    texts = {event.agent: event.text for event in finished}
    return Played(ended - started, ended - handed_over, texts)
