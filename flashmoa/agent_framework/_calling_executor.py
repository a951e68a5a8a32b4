"""Find the executor on whose behalf code runs (``find_calling_executor``)."""

from __future__ import annotations

import sys
from types import FrameType

from agent_framework import AgentExecutor, BaseAgent, Executor


def find_calling_executor() -> Executor | None:
    """Return the executor on whose behalf this code runs, if the stack shows one.

    ``None`` if the request is that of another agent, which the executor's agent uses, for instance
    as a tool.

    Agent Framework has no context that names the executor or agent that is running: its
    ContextVars hold the origin of events, opaque identities of runs, and telemetry. A ContextVar
    of ours would have to be set by replacing methods of the user's executors and agents.
    """
    frame: FrameType | None = sys._getframe(1)
    agents: list[object] = []
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, Executor):
            own = isinstance(holder, AgentExecutor) and holder.agent
            return None if own and any(agent is not own for agent in agents) else holder
        if isinstance(holder, BaseAgent):
            agents.append(holder)
        frame = frame.f_back
    return None
