"""Tell on whose behalf code runs: that of an agent, of one of its tools, or of another agent.

AutoGen's ``MessageHandlerContext`` names the id of the agent that handles a message, but neither
its runtime nor the object, and within one handler an agent may run others as tools; only the stack
tells which of them is calling. A tool runs in tasks of its own, whose stacks show no agent, so the
tools of an answer are noted in a context variable, which these tasks inherit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_core import AgentId, FunctionCall
from autogen_core._message_handler_context import MessageHandlerContext
from autogen_core.models import FunctionExecutionResult
from autogen_core.tools import BaseTool, Workbench

from flashmoa._stack import owners

logger = logging.getLogger(__name__)


def calling_agent() -> AgentId | None:
    """Return the AutoGen id of the agent on whose behalf this code runs, if there is one."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None


def caller_name() -> str:
    """Return the caller's name for events.

    That is the agent's name, with the ``_<team id>`` suffix that AutoGen adds removed, or
    ``"client"`` if no agent calls.
    """
    agent = calling_agent()
    return agent.type.removesuffix(f"_{agent.key}") if agent is not None else "client"


def is_call_of(member: object) -> bool:
    """Return whether the call being made is that of an agent itself.

    It may also be the call of one of its tools, or of an agent that it uses as a tool.
    """
    tools = _tools.get()
    if tools and tools.agent == calling_agent() and tools.task is not asyncio.current_task():
        return False
    kinds: Any = (BaseChatAgent, BaseTool, Workbench)
    return next((one for one in owners() if isinstance(one, kinds)), member) is member


@dataclass(slots=True)
class Tools:
    """The tools that an answer calls.

    Attributes:
        calls: the calls; AutoGen runs these very objects.
        agent, task: the agent, and the task in which it handles its message.
        iteration: how many answers before this one have called tools in the agent's turn.
        on_result: is called when a tool has ended, with its place among the calls and its result
            as its agent gets it; ``None`` if the tool was cancelled, or raised an exception that
            AutoGen does not handle.
    """

    calls: Sequence[FunctionCall]
    agent: AgentId | None
    task: asyncio.Task[Any] | None
    iteration: int = 0
    on_result: Callable[[int, str | None], None] | None = None

    def end(self, call: FunctionCall, result: str | None) -> None:
        places = [place for place, each in enumerate(self.calls) if each is call]
        try:
            if self.on_result is not None and places:
                self.on_result(places[0], result)
        except Exception:
            # Whatever is wrong with a link, the agent must get its tool's result.
            logger.exception("The result of %s is not linked because of the error below", call.name)


# The tasks of tools, and those that these start in turn, inherit this from their agent's task.
_tools: ContextVar[Tools | None] = ContextVar("flashmoa_tools", default=None)


def note_tools(calls: Sequence[FunctionCall]) -> Tools:
    """Note that the agent which this task belongs to is about to run tools."""
    earlier = _tools.get()
    tools = Tools(calls, calling_agent(), asyncio.current_task())
    if earlier is not None and earlier.agent == tools.agent:
        if earlier.task is not tools.task:
            return tools  # It is one of the agent's tools that asks a model, with tools of its own.
        tools.iteration = earlier.iteration + 1
    _tools.set(tools)
    return tools


@cache
def observe_tools() -> None:
    """Have ``AssistantAgent`` report the results of tools to :class:`Tools`, as they end.

    It runs the tools of an answer in one task each, and itself reports their results only when all
    of them have ended. What it runs for each of them is the one place where a result is as the
    agent gets it, whatever runs the tool, and no object of the user's has to be replaced.
    """
    execute: Any = AssistantAgent._execute_tool_call

    async def observed(
        tool_call: FunctionCall, *args: Any, **options: Any
    ) -> tuple[FunctionCall, FunctionExecutionResult]:
        tools = _tools.get()
        text: str | None = None
        try:
            done = await execute(tool_call, *args, **options)
            text = done[1].content
            return done
        finally:
            if tools is not None:
                tools.end(tool_call, text)

    AssistantAgent._execute_tool_call = staticmethod(observed)  # type: ignore[method-assign]
