"""The parts of a team that links need: of a given team, or of the one that a call comes from.

The latter is found on the stack. AutoGen's ``MessageHandlerContext`` names the id of the agent that
handles a message, but neither its runtime nor the object, and within one handler an agent may run
others as tools; nothing else in AutoGen tells which of them is calling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from autogen_agentchat.agents import BaseChatAgent, SocietyOfMindAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer


@dataclass(frozen=True, slots=True)
class TeamParts:
    """The parts of one team.

    Attributes:
        owner: the object that the link is kept on, to live as long.
        participants: agents and teams.
        manager_type: of the AutoGen agent that decides who speaks.
        reader: the ``SocietyOfMindAgent`` whose team it is, if so.
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

        ``None`` outside a team, or where its runtime does not hold its agents in this process.
        """
        found = _on_stack(sys._getframe(1))
        runtime: Any = getattr(found, "_runtime", None)
        if found is None or not hasattr(runtime, "_instantiated_agents"):
            return None
        key = found.id.key
        peers = [a for a in runtime._instantiated_agents.values() if a.id.key == key]
        managers = [a for a in peers if isinstance(a, BaseGroupChatManager)]
        if len(managers) != 1:
            return None
        return cls(
            owner=managers[0],
            team_id=key,
            runtime=runtime,
            participants=[a._agent for a in peers if isinstance(a, ChatAgentContainer)],
            manager_type=managers[0].id.type,
            is_running=lambda: runtime._run_context is not None,
        )


def _on_stack(frame: FrameType | None) -> Any:
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, ChatAgentContainer | BaseGroupChatManager):
            return holder
        frame = frame.f_back
    return None


def agent_on_stack() -> BaseChatAgent | None:
    """Return the agent whose code is asking its model, as far as the stack tells."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, BaseChatAgent):
            return holder
        frame = frame.f_back
    return None
