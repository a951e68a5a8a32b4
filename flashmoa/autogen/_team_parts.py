"""Collect the parts of a team that links need: of a given team, or of the one a call comes from.

The latter is found on the stack. AutoGen's ``MessageHandlerContext`` names the id of the agent that
handles a message, but neither its runtime nor the object, and within one handler an agent may run
others as tools; nothing else in AutoGen tells which of them is calling. A tool runs in tasks of its
own, whose stacks show no agent, so an agent's own task is noted before its tools start.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from autogen_agentchat.agents import BaseChatAgent, SocietyOfMindAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_core import AgentId
from autogen_core.tools import BaseTool, Workbench

from flashmoa.autogen._call_observers import calling_agent

# The agent whose tools have been called, and the task in which it handles its message. The tasks
# of its tools, and those that these start in turn, inherit this.
_calls_tools: ContextVar[tuple[AgentId | None, asyncio.Task[Any] | None] | None] = ContextVar(
    "flashmoa_calls_tools", default=None
)


@dataclass(frozen=True, slots=True)
class TeamParts:
    """Holds the parts of one team.

    Attributes:
        owner: the object that the link is kept on, so that both live equally long.
        participants: the team's agents and inner teams.
        manager_type: the type (in AutoGen's ids) of the agent that decides who speaks.
        reader: the ``SocietyOfMindAgent`` whose inner team this is, if it is one.
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
        """Return the parts of the team on whose behalf this code runs.

        ``None`` outside a team, or if its runtime does not hold its agents in this process.
        """
        caller = _find_self_on_stack(ChatAgentContainer, BaseGroupChatManager)
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


def find_caller_on_stack() -> BaseChatAgent | BaseTool[Any, Any] | Workbench | None:
    """Return the agent or tool whose code is calling a model, if the stack shows one."""
    return _find_self_on_stack(BaseChatAgent, BaseTool, Workbench)


def note_tools() -> None:
    """Note that the agent which this task belongs to is about to run tools."""
    _calls_tools.set((calling_agent(), asyncio.current_task()))


def is_task_of_tool() -> bool:
    """Return whether this code runs in a task that was started while its agent ran tools.

    Teams within a tool have agents of their own.
    """
    noted = _calls_tools.get()
    if noted is None:
        return False
    agent, task = noted
    return agent == calling_agent() and task is not asyncio.current_task()


def _find_self_on_stack(*kinds: type) -> Any:
    """Return the innermost ``self`` on the stack that is an instance of one of ``kinds``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, kinds):
            return holder
        frame = frame.f_back
    return None
