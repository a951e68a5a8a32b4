"""Run teams unlinked, warmed or linked on real engines; tell how each call found its stream."""

import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from autogen_agentchat.messages import BaseChatMessage
from autogen_agentchat.teams import BaseGroupChat

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.local import LocalEngine
from flashmoa.link.link import Ahead
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from tests.integration.support import wait_until_idle

Client = FlashMoAChatCompletionClient
Mode = Literal["unlinked", "warmed", "linked"]
MODES: tuple[Mode, ...] = ("unlinked", "warmed", "linked")
AHEAD: dict[Mode, Ahead] = {"unlinked": "nothing", "warmed": "known", "linked": "text"}
BuildTeam = Callable[[], BaseGroupChat]


def make(engine: LocalEngine, kind: type[Client] = Client, **more: Any) -> Client:
    settings = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}, **more}
    return kind(model="tiny", base_url=engine.url, **settings)


@asynccontextmanager
async def connected(*engines: LocalEngine, **more: Any) -> AsyncGenerator[list[Client]]:
    """Yield a client of each engine, whose cache is empty; no link may be left at the end."""
    clients = [make(engine, **more) for engine in engines]
    try:
        for client in clients:
            await client.engine.flush_cache()
        yield clients
        for client in clients:
            await wait_until_idle(client.engine)
    finally:
        for client in clients:
            await client.close()
        # Nothing is left open for calls that a closed client will not make.
        for engine in engines:
            async with EngineClient(engine.url) as other:
                await wait_until_idle(other)


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """One call.

    Attributes:
        status: ``hit`` or ``mispredicted`` as the engine reports it; ``late`` if the call came
            before its link was made, as the tiny model is quick; ``None`` if there was no link.
        at: when it finished, in Unix seconds.
    """

    agent: str
    text: str
    status: str | None
    usage: PromptUsage | None
    at: float

    @property
    def late_tokens(self) -> int:
        """Number of prompt tokens that were left to compute."""
        assert self.usage is not None and self.usage.late_tokens is not None
        return self.usage.late_tokens


def finished_calls(events: Iterable[Event]) -> list[FinishedCall]:
    """Return the finished calls, in the order of their ends."""
    outcomes: list[FinishedCall] = []
    for call in calls(events):
        if (end := call.finished) is None:
            continue
        status = end.usage.prompt_stream.status if end.usage and end.usage.prompt_stream else None
        if status is None and call.started.late:
            status = "late"
        outcomes.append(FinishedCall(call.agent, end.text, status, end.usage, end.at))
    return sorted(outcomes, key=lambda outcome: outcome.at)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a team: the messages with their sources, and the events."""

    messages: list[tuple[str, str]]
    events: list[Event]

    @property
    def calls(self) -> list[FinishedCall]:
        return finished_calls(self.events)

    def events_of(self, kind: type[Event], agent: str | None = None) -> list[Any]:
        return events_of(self.events, kind, agent)


def events_of(events: Iterable[Event], kind: type[Event], agent: str | None = None) -> list[Any]:
    """Return the events of a kind: an agent's events, or all."""
    return [e for e in events if isinstance(e, kind) and (agent is None or e.agent == agent)]


def texts(messages: Iterable[Any]) -> list[tuple[str, str]]:
    """Return messages without the ids of calls, which engines choose at random."""
    chat = [message for message in messages if isinstance(message, BaseChatMessage)]
    return [(one.source, re.sub("call_[0-9a-f]+", "", one.to_text())) for one in chat]


async def run_team(
    team: BaseGroupChat,
    task: str,
    mode: Mode = "linked",
    *,
    include: Sequence[str] = (),
    events: list[Event] | None = None,
) -> Run:
    """Run a team that is not linked yet; its events are also added to ``events``."""
    events = [] if events is None else events
    async with link(team, ahead=AHEAD[mode], include=include, listener=events.append):
        result = await team.run(task=task)
    return Run(texts(result.messages), events)


async def run_once(
    build: BuildTeam, clients: Sequence[Client], task: str, mode: Mode = "linked", **more: Any
) -> Run:
    """Run a new team once, on engines with empty caches."""
    for client in clients:
        await client.engine.flush_cache()
    return await run_team(build(), task, mode, **more)


async def run_both_ways(build: BuildTeam, clients: Sequence[Client], task: str, **more: Any) -> Run:
    """Run a team unlinked and linked, whose messages must be the same; return the linked run."""
    plain = await run_once(build, clients, task, "unlinked")
    linked = await run_once(build, clients, task, **more)
    assert linked.messages == plain.messages
    return linked


def check_predicted(calls: Sequence[FinishedCall]) -> None:
    """Check that all calls but late ones hit.

    At least half must: links that always come late are useless.
    """
    assert {call.status for call in calls} <= {"hit", "late"}
    assert 2 * sum(call.status == "hit" for call in calls) >= len(calls)


def check_never_mispredicted(calls: Sequence[FinishedCall]) -> None:
    statuses = {call.status for call in calls}
    assert "hit" in statuses and statuses <= {None, "hit", "late"}
