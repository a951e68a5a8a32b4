"""The members of a team that runs, and what each of them will have received by a turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent
from autogen_agentchat.base import Team
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._swarm_group_chat import SwarmGroupChatManager
from autogen_core import AgentId

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._dry_run import (
    DryRun,
    agent_dry_runs,
    manager_dry_runs,
    summary_dry_run,
)
from flashmoa.autogen._stock import client_of, own_code, rewrites
from flashmoa.autogen._team_parts import TeamParts, agent_on_stack
from flashmoa.autogen._turn_order import MANAGER, SUMMARY, starting, summary, upcoming
from flashmoa.linking.placeholders import NotForecastable, Placeholders
from flashmoa.linking.planned_links import Turn

# Any message of anyone; all that matters is that there is one.
_ANOTHER = TextMessage(content="?", source="x")


class TeamMembers:
    """The manager and the containers of a team. They exist once it has begun to run.

    Args:
        include: names of agents of the user's own classes that are to be linked.
    """

    def __init__(self, parts: TeamParts, include: Collection[str]) -> None:
        self._parts = parts
        self._include = include
        self._instances: dict[str, Any] = {}

    @property
    def is_running(self) -> bool:
        return self._parts.is_running()

    def name_of(self, agent: AgentId) -> str | None:
        """Return the member that an AutoGen agent id stands for, if it is one of this team."""
        team_id = self._parts.team_id
        if agent.key != team_id:
            return None
        if agent.type == self._parts.manager_type:
            return MANAGER
        name = agent.type.removesuffix(f"_{team_id}")
        return name if name != agent.type else None

    def calls_itself(self, name: str) -> bool:
        """Return whether the call that is being made is that member's own, not one of an agent that
        it uses, as a tool for instance."""
        caller = agent_on_stack()
        if caller is None or name == MANAGER:
            return True
        member: Any = next((one for one in self._parts.participants if one.name == name), None)
        while isinstance(member, MessageFilterAgent):
            member = member._wrapped_agent
        return caller is member

    def rewrites(self, agent: str) -> str | None:
        """Return why the message others get is not the text its model answers with, if so."""
        if agent == MANAGER:
            return "it decides who speaks"
        found = [one for one in self._parts.participants if one.name == agent]
        return (
            rewrites(found[0], agent in self._include) if found else "it is not known to its team"
        )

    async def upcoming(self, speaker: str) -> list[Turn]:
        """Return the turns that may follow.

        Finds every member they need first, so that what is read of the team right after this call
        is of the same moment.
        """
        manager = await self._find(MANAGER)
        await self._find(speaker)
        for turn in upcoming(manager, speaker):
            await self._find(turn.agent)
            for name in turn.writers:
                await self._find(name)
        turns = upcoming(manager, speaker)
        if isinstance(manager, SwarmGroupChatManager):
            targets = self._handoff_targets(speaker)
            turns = [turn for turn in turns if targets is None or turn.agent in targets]
        if self._parts.reader is not None and speaker != MANAGER:
            turns.append(summary(turns, speaker))
        return turns

    async def starting(self) -> list[Turn]:
        """Return the first turns of the next run of a team whose run has ended, for agents that
        have received messages since they last called their model.

        There are none for a ``SocietyOfMindAgent``'s team, which is reset after each run, and none
        after a run that failed or was cancelled: its manager still waits for an agent.
        """
        manager = await self._find(MANAGER)
        if self._parts.reader is not None or self.speaking():
            return []
        turns = starting(manager)
        for turn in turns:
            await self._find(turn.agent)
        return [turn for turn in turns if self.received(turn.agent)]

    def speaking(self) -> set[str]:
        """Return the names of those whom the manager has asked to speak, and waits for."""
        return set(self._instances[MANAGER]._active_speakers)

    def received(self, agent: str) -> list[BaseChatMessage]:
        """Return what a participant has been sent since its last turn; for the manager and the
        reader of a team, everything they have."""
        if agent == SUMMARY:
            return self._said()
        if agent == MANAGER:
            thread: list[Any] = self._instances[MANAGER]._message_thread
            return [message for message in thread if isinstance(message, BaseChatMessage)]
        return list(self._container(agent)._message_buffer)

    def received_since(self, agent: str) -> Callable[[], int | None]:
        """Return what counts the messages that an agent is sent from now on.

        It returns ``None`` once the agent, or its team, was reset, or it has had a turn.
        """
        thread: list[Any] = self._instances[MANAGER]._message_thread
        before, said = self.received(agent), len(thread)
        known = [*before, *thread[-1:]]

        def count() -> int | None:
            thread: list[Any] = self._instances[MANAGER]._message_thread
            received = self.received(agent)
            now = received[: len(before)] + thread[:said][-1:]
            if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
                return None
            return len(received) - len(before)

        return count

    def client(self, agent: str) -> FlashMoAChatCompletionClient:
        """Return the client that an agent calls. Raises: NotForecastable where it is not ours."""
        client = client_of(self._caller(agent))
        if client is None:
            raise NotForecastable("it has no FlashMoAChatCompletionClient")
        return client

    def dry_runs(self, agent: str) -> list[DryRun]:
        """Return dry runs of an agent's next call. Raises: NotForecastable."""
        if agent == MANAGER:
            return manager_dry_runs(self._caller(agent))
        reader = self._parts.reader
        if reader is not None and agent == SUMMARY:
            return [summary_dry_run(reader, self._said(), reader.name in self._include)]
        included = agent in self._include
        return agent_dry_runs(self._caller(agent), self.received(agent), included)

    def futures(self, turn: Turn, placeholders: Placeholders) -> list[Sequence[BaseChatMessage]]:
        """Return what an agent may be sent until its turn, each possibility in its order.

        Raises: NotForecastable.
        """
        widest = max((len(step) for step in turn.after), default=1)
        futures: list[Sequence[BaseChatMessage]] = []
        for first in range(widest):
            messages, is_known = self._in_order(turn, placeholders, first)
            futures.append(messages)
            if not turn.sure or not is_known:
                futures.append([*messages, _ANOTHER])
        return futures

    def _in_order(
        self, turn: Turn, placeholders: Placeholders, first: int
    ) -> tuple[list[BaseChatMessage], bool]:
        """Return the writers' messages, each step from its ``first``-th writer on, and whether that
        is all of them."""
        messages: list[BaseChatMessage] = []
        for step in turn.after:
            names = sorted(step)
            turned = first % len(names)
            for name in names[turned:] + names[:turned]:
                if not self._sends_one_message(name):
                    return messages, False
                source = self._instances[MANAGER]._name if name == MANAGER else name
                messages.append(TextMessage(content=placeholders.padded(name), source=source))
        return messages, True

    def _said(self) -> list[BaseChatMessage]:
        """Return what the team's members have said in this run, without the task."""
        manager = self._instances[MANAGER]
        names = {manager._name, *manager._participant_names}
        thread: list[Any] = manager._message_thread
        return [m for m in thread if isinstance(m, BaseChatMessage) and m.source in names]

    def _handoff_targets(self, giver: str) -> set[str] | None:
        """Return whom an agent can hand off to; ``None`` where only its own code knows."""
        agent = self._assistant(giver)
        return None if agent is None else {one.target for one in agent._handoffs.values()}

    def _assistant(self, name: str) -> AssistantAgent | None:
        agent: Any = None if name == MANAGER else self._caller(name)
        while isinstance(agent, MessageFilterAgent):
            agent = agent._wrapped_agent
        return agent if not own_code(agent, AssistantAgent) else None

    def _sends_one_message(self, name: str) -> bool:
        """Return whether a member's turn gives others exactly one message.

        A team sends any number, and a handoff comes with the results of other tools.
        """
        if name != MANAGER and isinstance(self._caller(name), Team):
            return False
        return not self._handoff_targets(name)

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
