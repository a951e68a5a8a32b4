"""Run a team unlinked, warmed or linked, and measure each turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autogen_agentchat.teams import BaseGroupChat

from flashmoa.autogen import FlashMoAChatCompletionClient, TeamLink, link, watch
from flashmoa.engine import PromptUsage
from flashmoa.linking.link import Ahead
from flashmoa.observe import Event, Listener
from flashmoa.observe.calls import calls

Mode = Literal["unlinked", "warmed", "linked"]
MODES: tuple[Mode, ...] = ("unlinked", "warmed", "linked")

_AHEAD: dict[Mode, Ahead] = {"unlinked": "nothing", "warmed": "known", "linked": "text"}

BuildTeam = Callable[[], BaseGroupChat]


@dataclass(frozen=True, slots=True)
class Turn:
    """One agent's call; times are Unix seconds."""

    agent: str
    started: float
    first_token: float
    last_token: float
    text: str
    usage: PromptUsage | None

    @property
    def decode_seconds(self) -> float:
        return self.last_token - self.first_token


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a team."""

    mode: Mode
    seconds: float
    turns: tuple[Turn, ...]
    events: tuple[Event, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(turn.text for turn in self.turns)

    def handoff(self, position: int) -> float:
        """Return the seconds between a turn's first token and the last token of the turn before."""
        return self.turns[position].first_token - self.turns[position - 1].last_token


@dataclass(slots=True)
class _Recorder:
    events: list[Event] = field(default_factory=list[Event])

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def turns(self) -> tuple[Turn, ...]:
        done: list[Turn] = []
        for call in calls(self.events):
            if (end := call.finished) is not None:
                token = call.first_token or end.at
                done.append(Turn(call.agent, call.started.at, token, end.at, end.text, end.usage))
        return tuple(done)


def attach(team: BaseGroupChat, ahead: Ahead, listener: Listener) -> TeamLink:
    """Link a team, or only watch it."""
    if ahead == "nothing":
        return watch(team, listener)
    return link(team, stream=ahead == "text", listener=listener)


async def run_once(
    build: BuildTeam, clients: Sequence[FlashMoAChatCompletionClient], task: str, mode: Mode
) -> Run:
    """Run a new team once, on engines with empty caches."""
    for client in clients:
        await client.engine.flush_cache()
    return await run_team(build(), task, mode)


async def run_team(team: BaseGroupChat, task: str, mode: Mode) -> Run:
    """Run a team that is not linked yet."""
    recorder = _Recorder()
    linked = attach(team, _AHEAD[mode], recorder)
    try:
        start = time.perf_counter()
        await team.run(task=task)
        seconds = time.perf_counter() - start
    finally:
        await linked.close()
    return Run(mode, seconds, recorder.turns(), tuple(recorder.events))
