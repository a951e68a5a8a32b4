"""Workflows of agents on two engines, to be played in several ways and in several copies.

Figure 7 of FlashAgents has one number for what several things bring together. Here each way adds
one of them to the way before it, so that they can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import anyio
from autogen_agentchat.teams import BaseGroupChat

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.linking.link import Ahead
from flashmoa.observe import CallFinished, Event
from flashmoa.workflow import Workflow
from flashmoa_bench.examples import example
from flashmoa_bench.runs import attach

Way = Literal["sequential", "unlinked", "shared", "warmed", "linked", "eager"]

ABOUT: dict[Way, str] = {
    "sequential": "stock SGLang, one agent at a time",
    "unlinked": "stock SGLang, agents side by side where they do not need each other",
    "shared": "the same with the plugin, no links: requests that share a prefix compute it once",
    "warmed": "what is known of a prompt is prefilled before its request comes",
    "linked": "the text of the agents before it, too, as they write it",
    "eager": "a slide is begun when its point of the outline is complete, not when all are",
}
AHEAD: dict[Way, Ahead] = {
    "sequential": "nothing",
    "unlinked": "nothing",
    "shared": "nothing",
    "warmed": "known",
    "linked": "text",
    "eager": "text",
}
STOCK: Collection[Way] = ("sequential", "unlinked")


@dataclass(frozen=True, slots=True)
class Duo:
    """The clients of the small model's engine and of the larger one's."""

    small: FlashMoAChatCompletionClient
    large: FlashMoAChatCompletionClient

    async def flush(self) -> None:
        await self.small.engine.flush_cache()
        await self.large.engine.flush_cache()

    async def close(self) -> None:
        await self.small.close()
        await self.large.close()


@dataclass(frozen=True, slots=True)
class Played:
    """One copy of a workflow.

    Attributes:
        seconds: from its start to its last token.
        response: from the last token that the last agents had to wait for to their own last one.
        texts: what the agents wrote, by their names.
    """

    seconds: float
    response: float
    texts: Mapping[str, str]


class Workload(Protocol):
    """A workflow. ``paper``: FlashAgents' latency by number of copies, 1 is its baseline."""

    name: str
    ways: tuple[Way, ...]
    paper: Mapping[int, float]
    # Whom the last agents wait for.
    upstream: Collection[str]

    async def run(self, duo: Duo, way: Way, copy: int, tell: Callable[[Event], None]) -> None: ...


class TeamWorkload:
    """An AutoGen team of ``examples/``."""

    def __init__(
        self,
        name: str,
        upstream: str,
        paper: Mapping[int, float],
        *,
        sequential: bool = False,
    ) -> None:
        self._module = example(name)
        self.name = name
        self.upstream: Collection[str] = list(getattr(self._module, upstream))
        self.paper = paper
        rest: tuple[Way, ...] = ("unlinked", "shared", "warmed", "linked")
        self.ways: tuple[Way, ...] = ("sequential", *rest) if sequential else rest

    async def run(self, duo: Duo, way: Way, copy: int, tell: Callable[[Event], None]) -> None:
        more = {"sequential": True} if way == "sequential" else {}
        team: BaseGroupChat = self._module.build_team(duo.small, duo.large, **more)
        linked = attach(team, AHEAD[way], tell)
        try:
            await team.run(task=f"{self._module.TASK} This is request {copy}.")
        finally:
            await linked.close()


class SlidesWorkload:
    """``examples/pptagent.py``."""

    name = "pptagent"
    ways: tuple[Way, ...] = ("unlinked", "shared", "warmed", "linked", "eager")
    upstream: Collection[str] = ("analyst",)

    def __init__(self, paper: Mapping[int, float]) -> None:
        self._module = example(self.name)
        self.paper = paper

    async def run(self, duo: Duo, way: Way, copy: int, tell: Callable[[Event], None]) -> None:
        small, large = duo.small.engine, duo.large.engine
        async with Workflow(small, ahead=AHEAD[way], listener=tell) as flow:
            topic = f"for engineers, number {copy}"
            await self._module.present(flow, small, large, topic=topic, eager=way == "eager")


def documents() -> list[Any]:
    """What the agents read: files."""
    found = [example(name).DOCUMENTS for name in ("chain", "mapreduce", "pptagent")]
    return list(dict.fromkeys(file for files in found for file in files))


def workloads() -> list[Workload]:
    """Those of FlashAgents §6.2 and 6.3, with the latencies of its Figure 7."""
    return [
        TeamWorkload("chain", "BEFORE_SUMMARY", {1: 0.982, 8: 0.881}),
        TeamWorkload("mapreduce", "REVIEWERS", {1: 0.597, 8: 0.853}, sequential=True),
        SlidesWorkload({1: 0.759}),
    ]


async def play(workload: Workload, duo: Duo, way: Way, copies: int) -> list[Played]:
    """So many copies at once, on empty caches."""
    await duo.flush()
    played: list[Played | None] = [None] * copies

    async def one(copy: int) -> None:
        events: list[Event] = []
        started = time.time()
        await workload.run(duo, way, copy, events.append)
        played[copy] = _played(events, started, workload.upstream)

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
