"""Predict what an agent asks when its tools have run, and learn the results of these tools.

An ``AssistantAgent`` runs the tools of an answer in one task each, and reports their results only
when all of them have ended. So these tasks are looked for among all tasks of the event loop: a task
has the call and its result exactly as AutoGen uses them, whatever runs the tool, and nothing of
AutoGen's or the user's has to be replaced.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import anyio.lowlevel
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_core import CancellationToken, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
)
from autogen_core.tools import BaseTool

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._dry_run import (
    ModelCall,
    clone_context,
    first_call,
    make_capturing_client,
)
from flashmoa.autogen._model_call import ToolAnswer
from flashmoa.autogen._stock import client_of, require_stock
from flashmoa.linking.forecasts import name_calls

# AutoGen starts the tools one or two rounds of the event loop after the answer, and later only if
# an agent awaits something in between. So all tasks are looked at after these numbers of rounds,
# each time later: looking takes a millisecond where there are 2,000 tasks.
_PAUSES = (0, 1, 1, 1, 2, 4, 8, 16, 32, 64)
_RUNS_TOOL = AssistantAgent._execute_tool_call.__code__


@dataclass(frozen=True, slots=True)
class OwnRequest:
    """The request that an agent makes when its tools have run.

    Attributes:
        client: the client that it is made with.
        tools: a name for each call of a tool; no agent can have such a name.
        dry_run: given the results in the calls' order, returns the request.
    """

    client: FlashMoAChatCompletionClient
    tools: list[str]
    dry_run: Callable[[Sequence[str]], Awaitable[ModelCall]]


def own_request(agent: AssistantAgent, answer: ToolAnswer, included: bool) -> OwnRequest | None:
    """Return the request that a stock agent makes after the tools of its answer, if it makes one.

    Call this while the agent still waits for the answer: its context and the stack are read.

    Args:
        included: see :func:`agent_dry_runs`.

    Raises: NotForecastable, see :func:`agent_dry_runs`.
    """
    subject: Any = agent
    iterates = _iteration() < subject._max_tool_iterations - 1
    hands_off = any(call.name in subject._handoffs for call in answer.calls)
    client = client_of(agent)
    if client is None or hands_off or not (iterates or subject._reflect_on_tool_use):
        return None
    for tool in answer.tools:
        if not included and not isinstance(tool, dict):
            require_stock(tool, BaseTool)
    context = clone_context(subject._model_context)
    more: dict[str, Any] = {"message_id": ""} if iterates else {"inner_messages": []}
    ask = partial(
        subject._call_llm if iterates else subject._reflect_on_tool_use_flow,
        model_client=make_capturing_client(agent, included),
        model_client_stream=False,
        system_messages=subject._system_messages,
        # The tools were listed for the answer's request; the workbench is not asked again.
        workbench=[],
        handoff_tools=list(answer.tools),
        agent_name=agent.name,
        cancellation_token=CancellationToken(),
        output_content_type=None,
        **more,
    )

    async def dry_run(results: Sequence[str]) -> ModelCall:
        history = clone_context(context)
        for message in _messages_of_iteration(agent.name, answer, results):
            await history.add_message(message)
        return await first_call(_drain(ask(model_context=history)))

    return OwnRequest(client, name_calls([call.name for call in answer.calls]), dry_run)


def _messages_of_iteration(
    agent: str, answer: ToolAnswer, results: Sequence[str]
) -> list[AssistantMessage | FunctionExecutionResultMessage]:
    """Return what an agent adds to its context for an answer that calls tools."""
    thought = answer.result.thought
    executed = [
        FunctionExecutionResult(content=text, call_id=call.id, is_error=False, name=call.name)
        for call, text in zip(answer.calls, results, strict=True)
    ]
    return [
        AssistantMessage(content=answer.calls, source=agent, thought=thought),
        FunctionExecutionResultMessage(content=executed),
    ]


def _iteration() -> int:
    """Return which iteration of its agent's loop over tools an answer belongs to, from 0.

    The call of the model is on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), BaseChatAgent):
        if "loop_iteration" in frame.f_locals:
            # The next iteration processes the answer.
            return frame.f_locals["loop_iteration"] + 1
        frame = frame.f_back
    return 0


async def _drain(items: Any) -> None:
    async for _ in items:
        pass


async def find_tool_tasks(calls: Sequence[FunctionCall]) -> list[asyncio.Task[Any] | None]:
    """Return the tasks in which AutoGen runs the tools of an answer, in the calls' order.

    ``None`` for each tool that is not found: it has ended already, or is not run at all.
    """
    for rounds in _PAUSES:
        for _ in range(rounds):
            await anyio.lowlevel.checkpoint()
        running = {id(call): task for task in asyncio.all_tasks() if (call := _tool_call_of(task))}
        found = [running.get(id(call)) for call in calls]
        if any(found):
            return found
    return [None] * len(calls)


def _tool_call_of(task: asyncio.Task[Any]) -> FunctionCall | None:
    """Return the call that a task runs, if it runs a tool of an ``AssistantAgent``."""
    coroutine = task.get_coro()
    if getattr(coroutine, "cr_code", None) is not _RUNS_TOOL:
        return None
    frame: Any = getattr(coroutine, "cr_frame", None)
    return None if frame is None else frame.f_locals.get("tool_call")


async def result_of(task: asyncio.Task[Any]) -> str | None:
    """Wait for a tool, and return its result as its agent gets it.

    ``None`` if the tool was cancelled, or raised an exception that AutoGen does not handle.
    """
    await asyncio.wait([task])
    if task.cancelled() or task.exception() is not None:
        return None
    _, result = task.result()
    return result.content
