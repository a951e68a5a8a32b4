"""Play workflows in several ways, and several copies at once.

Figure 7 of FlashAgents has one number for several techniques together. Here each way adds one
technique to the way before it, so that each one's effect can be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from autogen_agentchat.teams import BaseGroupChat

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient, TeamLink, link, watch
from flashmoa.linking.link import Ahead
from flashmoa.observe import CallFinished, Event, Listener
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.critical_path import decoding_seconds
from flashmoa_bench.harness.rounds import run_concurrently
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
# What part of a prompt is prefilled ahead of its request.
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
        """Close both clients."""
        await self.small.close()
        await self.large.close()


def greedy_client(url: str, model: str, tokens: int) -> FlashMoAChatCompletionClient:
    """Make a client whose answers can be compared token for token.

    Each answer has ``tokens`` tokens, at temperature 0.
    """
    return FlashMoAChatCompletionClient(
        model=model,
        base_url=url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """The times and texts of one copy of a workflow.

    Attributes:
        seconds: time from the copy's start to its last token.
        response: seconds from the end of the last upstream answer to the end of the workflow.
        decoding: seconds of the critical path without what linking can save; see
            :func:`decoding_seconds`.
        texts: the agents' answers, by the agents' names.
    """

    seconds: float
    response: float
    decoding: float
    texts: Mapping[str, str]


class AgentWorkflow(Protocol):
    """A workflow that can be played.

    Attributes:
        ways: ways in which it can be played.
        paper: FlashAgents' latency over that of its baseline, by number of copies.
        upstream: names of the agents that the last ones wait for.
    """

    name: str
    ways: tuple[WorkflowWay, ...]
    paper: Mapping[int, float]
    upstream: Collection[str]

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
        """Play copy number ``copy``, which differs from the others, and report its events."""
        ...


class TeamWorkflow:
    """Plays an AutoGen team as a workflow.

    Args:
        build: makes the team, given the clients of the small and of the larger model; the
            function's name is the workflow's.
        task: the team's task.
        upstream, paper: see :class:`AgentWorkflow`.
        build_sequential: makes the team with its agents one after the other, if that is different.
            Without it, the workflow is not played as ``sequential``.
    """

    def __init__(
        self,
        build: Callable[
            [FlashMoAChatCompletionClient, FlashMoAChatCompletionClient], BaseGroupChat
        ],
        task: str,
        upstream: Collection[str],
        paper: Mapping[int, float],
        build_sequential: Callable[..., BaseGroupChat] | None = None,
    ) -> None:
        self.name = build.__name__
        self.upstream = upstream
        self.paper = paper
        self._build = build
        self._build_sequential = build_sequential
        self._task = task
        ways: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked")
        self.ways: tuple[WorkflowWay, ...] = ("sequential", *ways) if build_sequential else ways

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
        """Play one copy, whose task has the copy's number."""
        build = self._build
        if way == "sequential" and self._build_sequential is not None:
            build = self._build_sequential
        team = build(clients.small, clients.large)
        linked = attach(team, _AHEAD[way], listener)
        try:
            await team.run(task=f"{self._task} This is request {copy}.")
        finally:
            await linked.close()


def attach(team: BaseGroupChat, ahead: Ahead, listener: Listener) -> TeamLink:
    """Link a team, or only watch it if ``ahead`` is ``"nothing"``."""
    if ahead == "nothing":
        return watch(team, listener)
    return link(team, stream=ahead == "text", listener=listener)


class SlidesWorkflow:
    """Plays the slides workflow (FlashAgents §6.3), which uses the plain API."""

    name = "pptagent"
    ways: tuple[WorkflowWay, ...] = ("unlinked", "shared", "warmed", "linked", "eager")
    upstream: Collection[str] = ("analyst",)
    paper: Mapping[int, float] = {1: 0.759}

    async def run(self, clients: Clients, way: WorkflowWay, copy: int, listener: Listener) -> None:
        """Play one copy, whose topic has the copy's number."""
        small, large = clients.small.engine, clients.large.engine
        async with Workflow(small, ahead=_AHEAD[way], listener=listener) as flow:
            topic = f"for engineers, number {copy}"
            await agents.slides(flow, small, large, topic=topic, eager=way == "eager")


def agent_workflows() -> list[AgentWorkflow]:
    """Return the workflows of FlashAgents §6.2 and 6.3, with the latencies of its Figure 7."""
    return [
        TeamWorkflow(
            agents.chain, agents.TRIP, list(agents.TRAVEL_AGENTS)[:-1], {1: 0.982, 8: 0.881}
        ),
        TeamWorkflow(
            agents.mapreduce,
            agents.REVIEW,
            list(agents.REVIEWERS),
            {1: 0.597, 8: 0.853},
            partial(agents.mapreduce, sequential=True),
        ),
        SlidesWorkflow(),
    ]


async def play(
    workflow: AgentWorkflow, clients: Clients, way: WorkflowWay, copies: int
) -> list[WorkflowRun]:
    """Play ``copies`` copies of a workflow at once, on empty caches."""
    await clients.flush()

    async def run(copy: int) -> WorkflowRun:
        events: list[Event] = []
        started = time.time()
        await workflow.run(clients, way, copy, events.append)
        return _summarise_run(events, started, workflow.upstream)

    return await run_concurrently(run, range(copies))


def _summarise_run(
    events: Sequence[Event], started: float, upstream: Collection[str]
) -> WorkflowRun:
    finished = [event for event in events if isinstance(event, CallFinished)]
    ended = max(event.at for event in finished)
    handed_over = max(event.at for event in finished if event.agent in upstream)
    texts = {event.agent: event.text for event in finished}
    return WorkflowRun(
        clock.seconds_of(ended - started),
        clock.seconds_of(ended - handed_over),
        clock.seconds_of(decoding_seconds(calls(events), started)),
        texts,
    )
