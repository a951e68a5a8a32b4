"""A team's running parts, and what each of them will have received by a turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autogen_agentchat.agents import MessageFilterAgent
from autogen_agentchat.base import Team
from autogen_agentchat.messages import BaseChatMessage, HandoffMessage, TextMessage
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_core import AgentId

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._forecast import DryRun, NotForecastable
from flashmoa.autogen._parts import Parts, agent_on_stack
from flashmoa.autogen._shadows import (
    agent_dry_runs,
    client_of,
    manager_dry_runs,
    rewrites,
    summary_dry_run,
)
from flashmoa.autogen._speakers import MANAGER, SUMMARY, Turn, summary, upcoming
from flashmoa.stand_ins import StandIns

# Some message of somebody; what matters is that there is one.
_ANOTHER = TextMessage(content="?", source="x")


class Roster:
    """The manager and the containers of a team. They exist once it has begun to run.

    Args:
        include: names of agents that are no stock ones and linked all the same.
    """

    def __init__(self, parts: Parts, include: Collection[str]) -> None:
        self._parts = parts
        self._include = include
        self._instances: dict[str, Any] = {}

    @property
    def is_running(self) -> bool:
        return self._parts.is_running()

    def name_of(self, agent_type: str, agent_key: str) -> str | None:
        """Who an AutoGen agent id stands for, if it is one of this team."""
        team_id = self._parts.team_id
        if agent_key != team_id:
            return None
        if agent_type == self._parts.manager_type:
            return MANAGER
        name = agent_type.removesuffix(f"_{team_id}")
        return name if name != agent_type else None

    def calls_itself(self, name: str) -> bool:
        """Whether the call that is being made is that member's own, and not one of an agent
        that it uses, as a tool for instance."""
        caller = agent_on_stack()
        if caller is None or name == MANAGER:
            return True
        member: Any = next((one for one in self._parts.participants if one.name == name), None)
        while isinstance(member, MessageFilterAgent):
            member = member._wrapped_agent
        return caller is member

    def rewrites(self, agent: str) -> str | None:
        """Why the message others get is not the text its model answers with, if so."""
        if agent == MANAGER:
            return "it decides who speaks"
        found = [one for one in self._parts.participants if one.name == agent]
        return (
            rewrites(found[0], agent in self._include) if found else "it is not known to its team"
        )

    async def upcoming(self, speaker: str) -> list[Turn]:
        """The turns that may follow; what is read of the team after it is as of the same moment."""
        manager = await self._find(MANAGER)
        await self._find(speaker)
        for turn in upcoming(manager, speaker):
            await self._find(turn.agent)
            for name in turn.writers:
                await self._find(name)
        turns = upcoming(manager, speaker)
        if self._parts.reader is not None and speaker != MANAGER:
            turns.append(summary(turns, speaker))
        return turns

    def received(self, agent: str) -> list[BaseChatMessage]:
        """What a participant has been sent since its last turn; what the reader has in all."""
        if agent == SUMMARY:
            return self._said()
        return [] if agent == MANAGER else list(self._container(agent)._message_buffer)

    def client(self, agent: str) -> FlashMoAChatCompletionClient:
        """Raises: NotForecastable."""
        client = client_of(self._caller(agent))
        if client is None:
            raise NotForecastable("it has no FlashMoAChatCompletionClient")
        return client

    def dry_runs(self, agent: str) -> list[DryRun]:
        """Raises: NotForecastable."""
        if agent == MANAGER:
            return manager_dry_runs(self._caller(agent))
        reader = self._parts.reader
        if reader is not None and agent == SUMMARY:
            return [summary_dry_run(reader, self._said(), reader.name in self._include)]
        included = agent in self._include
        return agent_dry_runs(self._caller(agent), self.received(agent), included)

    def futures(self, turn: Turn, stand_ins: StandIns) -> list[Sequence[BaseChatMessage]]:
        """What an agent may be sent until its turn, each possibility in its order.

        Raises: NotForecastable.
        """
        if turn.handoff:
            return [[self._handoff(turn)]]
        widest = max((len(step) for step in turn.after), default=1)
        futures: list[Sequence[BaseChatMessage]] = []
        for first in range(widest):
            messages, is_known = self._in_order(turn, stand_ins, first)
            futures.append(messages)
            if not turn.sure or not is_known:
                futures.append([*messages, _ANOTHER])
        return futures

    def _in_order(
        self, turn: Turn, stand_ins: StandIns, first: int
    ) -> tuple[list[BaseChatMessage], bool]:
        """The writers' messages, each step beginning with another writer; whether all."""
        messages: list[BaseChatMessage] = []
        for step in turn.after:
            names = sorted(step)
            turned = first % len(names)
            for name in names[turned:] + names[:turned]:
                if self._is_team(name):  # Who knows how many messages it will send.
                    return messages, False
                source = self._instances[MANAGER]._name if name == MANAGER else name
                messages.append(TextMessage(content=stand_ins.padded(name), source=source))
        return messages, True

    def _said(self) -> list[BaseChatMessage]:
        """What the team's members have said in this run, without the task they were given."""
        manager = self._instances[MANAGER]
        names = {manager._name, *manager._participant_names}
        thread: list[Any] = manager._message_thread
        return [m for m in thread if isinstance(m, BaseChatMessage) and m.source in names]

    def _handoff(self, turn: Turn) -> HandoffMessage:
        (giver,) = turn.after[0]
        handoffs: dict[str, Any] = getattr(self._caller(giver), "_handoffs", {})
        for handoff in handoffs.values():
            if handoff.target == turn.agent:
                return HandoffMessage(content=handoff.message, target=turn.agent, source=giver)
        raise NotForecastable(f"{giver} hands nothing off to it")

    def _is_team(self, name: str) -> bool:
        return name != MANAGER and isinstance(self._caller(name), Team)

    def _caller(self, agent: str) -> Any:
        if agent == SUMMARY:
            return self._parts.reader
        return self._instances[MANAGER] if agent == MANAGER else self._container(agent)._agent

    def _container(self, name: str) -> ChatAgentContainer:
        instance = self._instances.get(name)
        if not isinstance(instance, ChatAgentContainer):
            raise NotForecastable("it is not held by the stock container")
        return instance

    async def _find(self, name: str) -> Any:
        if name not in self._instances:
            team_id = self._parts.team_id
            kind = self._parts.manager_type if name == MANAGER else f"{name}_{team_id}"
            instance = await self._parts.runtime.try_get_underlying_agent_instance(
                AgentId(kind, team_id)
            )
            self._instances[name] = instance
        return self._instances[name]
