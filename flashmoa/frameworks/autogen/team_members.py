"""Look up a running team's members, the turns that may follow, and the messages before each turn.

This calls nothing that may have effects: no selector function, no termination condition.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import Team
from autogen_agentchat.messages import BaseChatMessage, HandoffMessage, TextMessage
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._graph._digraph_group_chat import GraphFlowManager
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import (
    MagenticOneOrchestrator,
)
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_agentchat.teams._group_chat._swarm_group_chat import SwarmGroupChatManager
from autogen_core import AgentId

from flashmoa._concurrency import finish
from flashmoa._stack import owners
from flashmoa.frameworks.autogen.calls import ToolAnswer, is_call_of
from flashmoa.frameworks.autogen.dry_run import (
    DryRun,
    agent_dry_runs,
    is_stock,
    manager_dry_run,
    own_request,
    summary_dry_run,
    unwrapped,
    why_rewritten,
)
from flashmoa.link.after_tools import RequestAfterTools
from flashmoa.link.expected import Turn, Writers
from flashmoa.link.prompt import NotForecastable, Placeholders

# The name of the manager's own calls (Selector, MagenticOne); no participant can have this name.
MANAGER = "(manager)"
# The name of a SocietyOfMindAgent's call that sums up its inner team's run.
SUMMARY = "(summary)"

# AutoGen's own selector prompt has the candidates before the conversation. As they change with each
# turn, the cache never has the conversation. The beginning of this prompt stays the same.
SELECTOR_PROMPT = """You decide who speaks next in a conversation. Who takes part:
{roles}

The conversation so far:

{history}

Which one of {participants} should speak next? Answer with that name and nothing else."""
# One more message, with unknown text and source.
_UNKNOWN_MESSAGE = TextMessage(content="?", source="x")


@dataclass(frozen=True, slots=True)
class TeamParts:
    """The parts of a team.

    Attributes:
        owner: the object that keeps the link, so that both live equally long.
        participants: the team's agents and inner teams.
        manager_type: the type (in AutoGen's ids) of the agent that decides who speaks.
        reader: the ``SocietyOfMindAgent`` that has this team as its inner team, if one has.
    """

    owner: Any
    team_id: str
    runtime: Any
    participants: Sequence[Any]
    manager_type: str
    is_running: Callable[[], bool]
    reader: SocietyOfMindAgent | None = None

    @classmethod
    def of(cls, team: BaseGroupChat, reader: SocietyOfMindAgent | None = None) -> TeamParts:
        return cls(
            owner=team,
            team_id=team._team_id,
            runtime=team._runtime,
            participants=team._participants,
            manager_type=team._group_chat_manager_topic_type,
            is_running=lambda: team._is_running,
            reader=reader,
        )

    @classmethod
    def of_caller(cls) -> TeamParts | None:
        """Return the parts of the team whose member runs this code.

        ``None`` outside a team, or if the team's runtime keeps no agents in this process.
        """
        kinds = (ChatAgentContainer, BaseGroupChatManager)
        caller = next((one for one in owners() if isinstance(one, kinds)), None)
        runtime: Any = getattr(caller, "_runtime", None)
        if caller is None or not hasattr(runtime, "_instantiated_agents"):
            return None
        key = caller.id.key
        peers = [agent for agent in runtime._instantiated_agents.values() if agent.id.key == key]
        managers = [agent for agent in peers if isinstance(agent, BaseGroupChatManager)]
        if len(managers) != 1:
            return None
        return cls(
            owner=managers[0],
            team_id=key,
            runtime=runtime,
            participants=[peer._agent for peer in peers if isinstance(peer, ChatAgentContainer)],
            manager_type=managers[0].id.type,
            is_running=lambda: runtime._run_context is not None,
        )


class TeamMembers:
    """Finds the manager and the agent containers of a team, which exist once it has begun to run.

    Args:
        include: names of agents of user-defined classes that are to be linked.
    """

    def __init__(self, parts: TeamParts, include: Collection[str]) -> None:
        self._parts = parts
        self._include = include
        # The manager and the containers found so far.
        self._instances: dict[str, Any] = {}

    @property
    def is_running(self) -> bool:
        return self._parts.is_running()

    @property
    def current_run(self) -> object:
        """An object that is different in each run, if the team has its own runtime.

        ``None`` while that runtime does not run.
        """
        runtime = self._parts.runtime
        return getattr(runtime, "_run_context", runtime)

    @property
    def unknown_manager(self) -> str | None:
        """The name of the manager's class, if its rules are not AutoGen's."""
        manager = self._instances.get(MANAGER)
        is_known = manager is None or is_stock(manager, *_RULES)
        return None if is_known else type(manager).__name__

    def name_of(self, agent: AgentId) -> str | None:
        """Return the name of the team's member with this AutoGen agent id, if there is one."""
        team_id = self._parts.team_id
        if agent.key != team_id:
            return None
        if agent.type == self._parts.manager_type:
            return MANAGER
        name = agent.type.removesuffix(f"_{team_id}")
        return name if name != agent.type else None

    def is_own_call(self, name: str) -> bool:
        """Return whether this member itself is calling, not one of its tools."""
        if name == MANAGER:
            return True
        return is_call_of(unwrapped(self._participant(name)))

    def why_rewritten(self, name: str) -> str | None:
        """Return why others may get a message other than its model's text, or ``None``."""
        if name == MANAGER:
            return "it decides who speaks"
        member = self._participant(name)
        if member is None:
            return "its team has no participant of this name"
        return why_rewritten(member, name in self._include)

    async def upcoming(self, speaker: str) -> list[Turn]:
        """Return the turns that may follow while ``speaker`` writes, the likeliest first.

        This finds all members of the turns first. So the turns, and everything that is read after
        this call without an ``await``, show the same moment.
        """
        manager = await self._find(MANAGER)
        await self._find(speaker)
        for turn in upcoming_turns(manager, speaker):
            await self._find(turn.agent)
            for name in turn.writers:
                await self._find(name)
        turns = upcoming_turns(manager, speaker)
        if isinstance(manager, SwarmGroupChatManager):
            targets = self._handoff_targets(speaker)
            turns = [turn for turn in turns if targets is None or turn.agent in targets]
        if self._parts.reader is not None and speaker != MANAGER:
            turns.append(summary_turn(turns, speaker))
        return turns

    async def first_turns(self) -> list[Turn]:
        """Return the first turns of the team's next run, after the end of a run.

        They are turns of agents that have received messages since their last model call. There are
        none for a ``SocietyOfMindAgent``'s team, which is reset after each run, and none after a
        run that failed or was cancelled: its manager still waits for an agent.
        """
        manager = await self._find(MANAGER)
        if self._parts.reader is not None or self.active_speakers():
            return []
        turns = first_turns(manager)
        for turn in turns:
            await self._find(turn.agent)
        return [turn for turn in turns if self.received(turn.agent)]

    def active_speakers(self) -> set[str]:
        """Return the names of the agents that the manager waits for."""
        return set(self._instances[MANAGER]._active_speakers)

    def received(self, agent: str) -> list[BaseChatMessage]:
        """Return the messages that an agent has received since its last turn.

        The manager and ``SUMMARY`` have received all messages of the run so far.
        """
        if agent == SUMMARY:
            return self._team_messages()
        if agent == MANAGER:
            thread: list[Any] = self._instances[MANAGER]._message_thread
            return [message for message in thread if isinstance(message, BaseChatMessage)]
        return list(self._container(agent)._message_buffer)

    def count_received_since(self, agent: str) -> Callable[[], int | None]:
        """Return a function that counts the messages an agent has received since this call.

        It returns ``None`` after the agent or its team was reset, or the agent has had a turn.
        """
        thread: list[Any] = self._instances[MANAGER]._message_thread
        before, thread_length = self.received(agent), len(thread)
        known = [*before, *thread[-1:]]

        def count() -> int | None:
            thread: list[Any] = self._instances[MANAGER]._message_thread
            received = self.received(agent)
            now = received[: len(before)] + thread[:thread_length][-1:]
            if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
                return None
            return len(received) - len(before)

        return count

    def dry_runs(self, agent: str) -> list[DryRun]:
        """Return dry runs of an agent's next call.

        Raises: NotForecastable if there can be none, see :func:`agent_dry_runs`.
        """
        if agent == MANAGER:
            return [manager_dry_run(self._caller(agent))]
        reader = self._parts.reader
        if reader is not None and agent == SUMMARY:
            return [summary_dry_run(reader, self._team_messages(), reader.name in self._include)]
        included = agent in self._include
        return agent_dry_runs(self._caller(agent), self.received(agent), included)

    def own_request(self, name: str, answer: ToolAnswer) -> RequestAfterTools | None:
        """Return the agent's request after the tools of its answer; see :func:`own_request`."""
        agent, included = self._assistant(name), name in self._include
        return None if agent is None else own_request(name, agent, answer, included)

    def possible_futures(
        self, turn: Turn, placeholders: Placeholders
    ) -> list[Sequence[BaseChatMessage]]:
        """Return the messages that a turn's agent may receive, one list for each possibility.

        Writers in the same step finish in any order, so each is first in one of the lists.

        Raises: NotForecastable if a writer is not in AutoGen's own container.
        """
        futures: list[Sequence[BaseChatMessage]] = []
        for order in turn.orders:
            messages, are_all = self._messages_in_order(order, placeholders)
            futures.append(messages)
            if not turn.sure or not are_all:
                futures.append([*messages, _UNKNOWN_MESSAGE])
        return futures

    def _messages_in_order(
        self, order: Sequence[str], placeholders: Placeholders
    ) -> tuple[list[BaseChatMessage], bool]:
        """Return the writers' messages, and whether the agent gets no others until its turn."""
        messages: list[BaseChatMessage] = []
        for name in order:
            if not self._sends_one_message(name):
                return messages, False
            source = self._instances[MANAGER]._name if name == MANAGER else name
            messages.append(TextMessage(content=placeholders.padded(name), source=source))
        return messages, True

    def _team_messages(self) -> list[BaseChatMessage]:
        """Return the members' messages in this run, without the task."""
        manager = self._instances[MANAGER]
        names = {manager._name, *manager._participant_names}
        thread: list[Any] = manager._message_thread
        return [m for m in thread if isinstance(m, BaseChatMessage) and m.source in names]

    def _handoff_targets(self, name: str) -> set[str] | None:
        """Return the agents that a member can hand off to; ``None`` if they are unknown."""
        agent = self._assistant(name)
        return None if agent is None else {handoff.target for handoff in agent._handoffs.values()}

    def _assistant(self, name: str) -> AssistantAgent | None:
        """Return the ``AssistantAgent`` of a participant, also from within message filters.

        An agent of a subclass only counts if the user included it.
        """
        agent = unwrapped(self._participant(name))
        included = name in self._include and isinstance(agent, AssistantAgent)
        return agent if included or is_stock(agent, AssistantAgent) else None

    def _sends_one_message(self, name: str) -> bool:
        """Return whether a member's turn gives others exactly one message.

        A team sends any number of messages. A handoff comes with the results of other tools.
        """
        if name != MANAGER and isinstance(self._caller(name), Team):
            return False
        return not self._handoff_targets(name)

    def _participant(self, name: str) -> Any:
        return next((one for one in self._parts.participants if one.name == name), None)

    def _caller(self, agent: str) -> Any:
        """Return the agent or manager that makes the calls with the name ``agent``."""
        if agent == SUMMARY:
            return self._parts.reader
        return self._instances[MANAGER] if agent == MANAGER else self._container(agent)._agent

    def _container(self, name: str) -> ChatAgentContainer:
        instance = self._instances.get(name)
        if not isinstance(instance, ChatAgentContainer):
            raise NotForecastable("its team does not run it in AutoGen's ChatAgentContainer")
        return instance

    async def _find(self, name: str) -> Any:
        """Return the manager, or a member's container, and keep it in ``_instances``."""
        if name not in self._instances:
            team_id = self._parts.team_id
            kind = self._parts.manager_type if name == MANAGER else f"{name}_{team_id}"
            instance = await self._parts.runtime.try_get_underlying_agent_instance(
                AgentId(kind, team_id)
            )
            self._instances[name] = instance
        return self._instances[name]


def upcoming_turns(manager: BaseGroupChatManager, speaker: str) -> list[Turn]:
    """Return the turns that may follow while ``speaker`` writes, the likeliest first.

    The speaker's own next turn is left out: there its text is an assistant message, which cannot be
    known before the text is complete.
    """
    return _RULES[type(manager)](manager, speaker) if is_stock(manager, *_RULES) else []


def first_turns(manager: BaseGroupChatManager) -> list[Turn]:
    """Return the first turns of a team's next run, after the end of a run.

    There are none if the next task decides who begins. As this task is unknown, no turn is sure.
    """
    names = _FIRST_RULES[type(manager)](manager) if is_stock(manager, *_FIRST_RULES) else []
    return [Turn(name, sure=False) for name in names]


def summary_turn(turns: Sequence[Turn], speaker: str) -> Turn:
    """Return the turn of a ``SocietyOfMindAgent`` if its team ends after the present writers.

    Args:
        turns: see :func:`upcoming_turns`.
        speaker: name of an agent that is writing now.
    """
    writing_now = [turn.after[0] for turn in turns if turn.after]
    return Turn(SUMMARY, (frozenset([speaker]).union(*writing_now),), sure=False)


def _turns_left(manager: Any) -> int:
    if manager._max_turns is None:
        return sys.maxsize
    # AutoGen counts the present turn when it ends.
    return max(0, manager._max_turns - manager._current_turn - 1)


def _round_robin_turns(manager: Any, speaker: str) -> list[Turn]:
    names = list(manager._participant_names)
    position = names.index(speaker)
    order = (names[position + 1 :] + names[:position])[: _turns_left(manager)]
    steps = [frozenset([name]) for name in [speaker, *order]]
    return [Turn(name, tuple(steps[: place + 1])) for place, name in enumerate(order)]


def _graph_turns(manager: Any, speaker: str) -> list[Turn]:
    """Follow the graph: a step begins when all agents of the previous step have finished."""
    run = _GraphRun(manager)
    active = list(manager._active_speakers)
    if speaker not in active:
        active.append(speaker)
    turns: list[Turn] = []
    steps: list[Writers] = []
    seen = set(active)
    sure = True
    while active and len(steps) < _turns_left(manager):
        steps.append(frozenset(active))
        sure = run.finish(active) and sure
        active = run.drain()
        turns += [Turn(name, tuple(steps), sure) for name in active if name not in seen]
        if not sure or seen & set(active):
            break
        seen |= set(active)
    return turns


class _GraphRun:
    """Steps through a graph on a copy of a ``GraphFlowManager``, by AutoGen's own code."""

    def __init__(self, manager: Any) -> None:
        self._edges = manager._edges
        self._shadow: Any = copy.copy(manager)
        self._shadow._message_thread = []
        # A condition may be code of the user's.
        unconditional = {"condition": None, "condition_function": None}
        self._shadow._edges = {
            name: [edge.model_copy(update=unconditional) for edge in edges]
            for name, edges in manager._edges.items()
        }
        for name in ("_remaining", "_enqueued_any", "_triggered_activation_groups", "_ready"):
            setattr(self._shadow, name, copy.deepcopy(getattr(manager, name)))

    def finish(self, names: Sequence[str]) -> bool:
        """Continue as if these agents had spoken and the conditions of their edges held.

        Returns: whether no edge had a condition.
        """
        for name in names:
            finish(self._shadow.update_message_thread([TextMessage(content="", source=name)]))
        edges = [edge for name in names for edge in self._edges.get(name, ())]
        return all(edge.condition is None and edge.condition_function is None for edge in edges)

    def drain(self) -> list[str]:
        """Return the names of the agents that speak next, and reset their counters."""
        return list(dict.fromkeys(finish(self._shadow.select_speaker(()))))


def _selector_turns(manager: Any, speaker: str) -> list[Turn]:
    if speaker != MANAGER and not _turns_left(manager):
        return []
    after = () if speaker == MANAGER else (frozenset([speaker]),)
    previous = manager._previous_speaker
    repeated = manager._allow_repeated_speaker
    names = [
        name
        for name in _sort_by_habit(manager, previous)
        if name != speaker and (repeated or name != previous)
    ]
    candidates = [Turn(name, after, sure=False) for name in names]
    if speaker == MANAGER or not _asks_model(manager) or len(names) < 2:
        return candidates
    return [Turn(MANAGER, after), *candidates]


def _asks_model(manager: Any) -> bool:
    """Return whether a model selects the speaker, not a function of the user's."""
    return manager._selector_func is None and manager._candidate_func is None


def _sort_by_habit(manager: Any, speaker: str | None) -> list[str]:
    """Return the participants, the most frequent followers of ``speaker`` so far first."""
    names = list(manager._participant_names)
    spoke = [m.source for m in manager._message_thread if m.source in names]
    followed = [after for before, after in pairwise(spoke) if before == speaker]
    return sorted(names, key=lambda name: -followed.count(name))


def _swarm_turns(manager: Any, speaker: str) -> list[Turn]:
    """Return the turns of the agents that the speaker may hand off to.

    Their prompts wait for no writer: the texts before the handoff's message (a thought of the
    speaker, results of its other tools) are unknown.
    """
    if not _turns_left(manager):
        return []
    names = [name for name in _sort_by_habit(manager, speaker) if name != speaker]
    return [Turn(name, sure=False) for name in names]


def _magentic_turns(manager: Any, speaker: str) -> list[Turn]:
    """Return the orchestrator's turn after the speaker's, and the other agents' turns after it.

    The orchestrator cuts its instruction out of JSON, so that others never get its text as written.
    """
    if speaker == MANAGER:
        return [
            Turn(name, (frozenset([MANAGER]),), sure=False)
            for name in _sort_by_habit(manager, None)
            if manager._message_thread
        ]
    steps = (frozenset([speaker]), frozenset([MANAGER]))
    others = [name for name in manager._participant_names if name != speaker]
    return [Turn(MANAGER, steps[:1]), *(Turn(name, steps, sure=False) for name in others)]


_RULES: dict[type[BaseGroupChatManager], Callable[[Any, str], list[Turn]]] = {
    RoundRobinGroupChatManager: _round_robin_turns,
    GraphFlowManager: _graph_turns,
    SelectorGroupChatManager: _selector_turns,
    SwarmGroupChatManager: _swarm_turns,
    MagenticOneOrchestrator: _magentic_turns,
}


def _first_of_selector(manager: Any) -> list[str]:
    return [MANAGER] if _asks_model(manager) and len(manager._participant_names) > 1 else []


def _first_of_swarm(manager: Any) -> list[str]:
    handoffs = [m for m in manager._message_thread if isinstance(m, HandoffMessage)]
    first = handoffs[-1].target if handoffs else manager._current_speaker
    # The last handoff may be to the user, who then hands off.
    return [first] if first in manager._participant_names else []


_FIRST_RULES: dict[type[BaseGroupChatManager], Callable[[Any], list[str]]] = {
    RoundRobinGroupChatManager: lambda m: [m._participant_names[m._next_speaker_index]],
    GraphFlowManager: lambda m: list(m._ready),
    SelectorGroupChatManager: _first_of_selector,
    SwarmGroupChatManager: _first_of_swarm,
}
