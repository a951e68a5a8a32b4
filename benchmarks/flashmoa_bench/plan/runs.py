"""Run a team on modelled engines, unlinked and linked in turn (``TeamRunner``)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import anyio
from autogen_agentchat.teams import BaseGroupChat
from autogen_core.models import ChatCompletionClient

from flashmoa._concurrency import all_of
from flashmoa.autogen import FlashMoAChatCompletionClient, TeamLink, link
from flashmoa.engine import EngineClient
from flashmoa.observe import Event, Listener
from flashmoa.observe.calls import Call, calls
from flashmoa_bench.harness.modelled_gpus import counted_since, read_devices
from flashmoa_bench.plan.team import Caller, PlanError, TeamFile, find_callers, limit_turns

Way = Literal["unlinked", "linked"]
WAYS: tuple[Way, Way] = ("unlinked", "linked")


@dataclass(frozen=True, slots=True)
class TeamRun:
    """A run of a copy of the team; ``seconds`` is the time from its start to its end."""

    copy: int
    seconds: float
    events: tuple[Event, ...]

    @property
    def calls(self) -> list[Call]:
        """The agents' calls, in the order of their starts."""
        return calls(self.events)


@dataclass(frozen=True, slots=True)
class Round:
    """All copies of the team, run at once on empty caches; ``devices`` counts this round alone."""

    way: Way
    seconds: float
    runs: Sequence[TeamRun]
    devices: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TeamRunner:
    """Runs copies of a user's team on modelled engines.

    Args:
        engines: clients of the engines, by their names in events.
        placement: the name of each agent's engine.
        lengths: number of tokens of each agent's answers.
        max_turns: replaces the team's own limit; ``None`` leaves it.
        include: agents to link on request; see :func:`flashmoa.autogen.link`.
    """

    file: TeamFile
    task: str
    engines: Mapping[str, EngineClient]
    placement: Mapping[str, str]
    lengths: Mapping[str, int]
    max_turns: int | None = None
    include: Sequence[str] = ()

    async def play(self, way: Way, copies: int) -> Round:
        """Run the copies at once; with several copies, each task has the copy's number.

        Raises: PlanError if a copy fails; EngineError if an engine fails.
        """
        async with AsyncExitStack() as stack:
            teams = [await stack.enter_async_context(self._build()) for _ in range(copies)]
            before = await read_devices(self.engines)
            for engine in self.engines.values():
                await engine.flush_cache()
            started = time.perf_counter()
            runs = await all_of(
                [
                    partial(self._run, way, team, copy if copies > 1 else None)
                    for copy, team in enumerate(teams, 1)
                ]
            )
            seconds = time.perf_counter() - started
        after = await read_devices(self.engines)
        counted = {name: counted_since(before[name], after[name]) for name in before}
        return Round(way, seconds, runs, counted)

    @asynccontextmanager
    async def _build(self) -> AsyncGenerator[BaseGroupChat]:
        """Load the team with clients of the modelled engines, which are closed at the end.

        The user's code may take long, so this happens before a run is timed.
        """
        team = (await self.file.load()).team
        limit_turns(team, self.max_turns)
        callers = find_callers(team)
        configured = {id(caller.client): caller.client for caller in callers}
        for client in configured.values():
            await client.close()
        clients: list[ChatCompletionClient] = []
        try:
            for caller in callers:
                url = self.engines[self.placement[caller.name]].url
                client = modelled_client(caller, url, self.lengths[caller.name])
                clients.append(client)
                caller.replace_client(client)
            yield team
        finally:
            with anyio.CancelScope(shield=True):
                await all_of([client.close for client in clients])

    async def _run(self, way: Way, team: BaseGroupChat, copy: int | None) -> TeamRun:
        events: list[Event] = []
        names = {engine.url: name for name, engine in self.engines.items()}

        def listen(event: Event) -> None:
            events.append(replace(event, engine=names.get(event.engine, event.engine)))

        attached = self._attach(way, team, listen)
        task = self.task if copy is None else f"{self.task} This is request {copy}."
        try:
            started = time.perf_counter()
            await team.run(task=task)
            seconds = time.perf_counter() - started
            # From now on, events belong to links for the team's next run.
            reported = tuple(events)
        # AutoGen reports an agent's error as a RuntimeError with its traceback.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise PlanError(f"the team failed in a run that was {way}: {reason}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await attached.close()
        return TeamRun(copy or 1, seconds, reported)

    def _attach(self, way: Way, team: BaseGroupChat, listener: Listener) -> TeamLink:
        try:
            if way == "linked":
                return link(team, include=self.include, listener=listener)
            return link(team, ahead="nothing", listener=listener)
        except ValueError as error:
            raise PlanError(f"the team cannot be linked: {error}") from error


def modelled_client(caller: Caller, url: str, tokens: int) -> FlashMoAChatCompletionClient:
    """Return a modelled engine's client for an agent, with answers of ``tokens`` tokens.

    It keeps the agent's own client's treatment of messages and arguments for the chat template.
    """
    config: dict[str, Any] = getattr(caller.client, "_raw_config", {})
    kept = {
        name: config[name]
        for name in ("add_name_prefixes", "include_name_in_message")
        if name in config
    }
    return FlashMoAChatCompletionClient(
        model="hash",
        base_url=url,
        model_info=caller.client.model_info,
        merge_user_messages=getattr(caller.client, "_merge_user_messages", False),
        temperature=0,
        max_tokens=tokens,
        extra_body={**(config.get("extra_body") or {}), "ignore_eos": True},
        **kept,
    )


def find_difference(rounds: Sequence[Round]) -> str | None:
    """Return a sentence with an agent whose answers differed between runs; ``None`` without one.

    Agents that write side by side end in any order, and their readers' prompts have that order. So
    answers are compared if the same calls had ended before.
    """
    known: dict[tuple[Any, ...], str] = {}
    for played in rounds:
        for run in played.runs:
            for key, text in _answers(run).items():
                if known.setdefault((run.copy, *key), text) != text:
                    return (
                        f"{key[0]} did not write the same text in all runs: either the file does "
                        "not build the same team and prompts whenever it is loaded, which has to "
                        "be changed, or this is an error in FlashMoA; please report it"
                    )
    return None


def _answers(run: TeamRun) -> dict[tuple[Any, ...], str]:
    """Return each answer by its agent, turn, and the agents that had ended before it began."""
    ended = sorted(
        ((call, call.finished) for call in run.calls if call.finished is not None),
        key=lambda pair: pair[1].at,
    )
    turns = Counter[str]()
    answers: dict[tuple[Any, ...], str] = {}
    for call, answer in ended:
        turns[call.agent] += 1
        before = tuple(other.agent for other, end in ended if end.at <= call.started.at)
        answers[call.agent, turns[call.agent], before] = answer.text
    return answers
