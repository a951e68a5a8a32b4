"""Tell on whose behalf a call is made, and what its answer is for others; report its usage.

*Whose:* AutoGen's ``MessageHandlerContext`` names the id of the agent that handles a message, but
neither its runtime nor the object, and within one handler an agent may run others as tools; only
the stack tells which of them is calling. A tool runs in tasks of its own, whose stacks show no
agent, so the tools of an answer are noted in a context variable, which these tasks inherit.

*Usage:* the stock client logs an ``LLMCallEvent`` or an ``LLMStreamEndEvent`` from within its
methods, with the number of prompt and answer tokens. A filter of its logger adds ``cached_tokens``,
``streamed_tokens`` and ``late_tokens`` to that event; events of other clients pass as they are.
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
from autogen_core import EVENT_LOGGER_NAME, AgentId, CancellationToken, FunctionCall
from autogen_core._message_handler_context import MessageHandlerContext
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent
from autogen_core.models import (
    CreateResult,
    FunctionExecutionResult,
    ModelFamily,
    ModelInfo,
    RequestUsage,
)
from autogen_core.tools import BaseTool, Tool, ToolSchema, Workbench
from pydantic import BaseModel

from flashmoa._stack import owners
from flashmoa.engine import PromptUsage
from flashmoa.link.calls import CallResult, ObservedCall, current_call
from flashmoa.link.expected import ChatRequest
from flashmoa.scoring import Candidate, Scorer, Scores

logger = logging.getLogger(__name__)

# Why the answer of a scoring call does not reach other agents as it is written.
SCORED_REASON = "its answer is scored, not written"

JsonOutput = bool | type[BaseModel] | None


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


@dataclass
class EngineUsage(RequestUsage):
    """Extends AutoGen's usage by how the engine computed the prompt, in tokens.

    ``prompt_tokens = cached_tokens + late_tokens``; ``streamed_tokens`` of the cached ones were
    computed by the call's link before the call. ``None`` if the engine does not report a count.
    """

    cached_tokens: int | None = None
    streamed_tokens: int | None = None
    late_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer that calls tools.

    Attributes:
        offered: the tools that its request offered.
        called: the tools that it calls.
    """

    result: CreateResult
    offered: Sequence[Tool | ToolSchema]
    called: Tools


def why_held_back(json_output: JsonOutput, model_info: ModelInfo) -> str | None:
    """Return why an answer's text must not reach other agents as it arrives, if it must not."""
    if isinstance(json_output, type):
        return "its answer is structured output, which AutoGen rewrites"
    if model_info["family"] == ModelFamily.R1:
        return "its reasoning is removed from its text"
    return None


def finish_call(
    call: ObservedCall,
    result: CreateResult,
    json_output: JsonOutput,
    tools: Sequence[Tool | ToolSchema],
) -> CreateResult:
    """Report the result to a call's observers. Return it with the engine's usage.

    Args:
        tools: the tools that the request offered.
    """
    usage = call.usage
    if usage is not None and usage.cached_tokens is not None:
        result.usage = EngineUsage(
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            streamed_tokens=usage.streamed_tokens,
            late_tokens=usage.late_tokens,
        )
    text = result.content if isinstance(result.content, str) else None
    # AutoGen turns a structured answer into a message other than its text.
    is_forwarded = text is not None and not isinstance(json_output, type)
    tool_calls = None
    if not isinstance(result.content, str):
        tool_calls = ToolAnswer(result, tools, note_tools(result.content))
    call.finish(CallResult(text or "", usage, result.finish_reason, is_forwarded, tool_calls))
    return result


class _PromptTokensFilter(logging.Filter):
    """Adds the current call's token counts to its log event."""

    def filter(self, record: logging.LogRecord) -> bool:
        call, event = current_call(), record.msg
        if call is None or call.usage is None:
            return True
        if isinstance(event, LLMCallEvent | LLMStreamEndEvent):
            event.kwargs["cached_tokens"] = call.usage.cached_tokens
            event.kwargs["streamed_tokens"] = call.usage.streamed_tokens
            event.kwargs["late_tokens"] = call.usage.late_tokens
        return True


logging.getLogger(EVENT_LOGGER_NAME).addFilter(_PromptTokensFilter())


async def score_call(
    call: ObservedCall,
    request: ChatRequest,
    candidates: Sequence[Candidate],
    length_normalised: bool,
    cancellation_token: CancellationToken | None,
) -> Scores:
    """Score candidates within a call; see :meth:`FlashMoAChatCompletionClient.score`."""
    with call:
        call.send(request.body)
        scorer = Scorer(request.engine, template_args=request.body["chat_template_kwargs"])
        scoring = asyncio.ensure_future(
            scorer.score(
                request.body["messages"],
                candidates,
                length_normalised=length_normalised,
                prompt_stream_id=call.prompt_stream_id,
            )
        )
        if cancellation_token is not None:
            cancellation_token.link_future(scoring)
        try:
            scores = await scoring
        finally:
            scoring.cancel()
        call.finish(CallResult(scores.best, _usage(scores), "stop", is_forwarded=False))
        return scores


def _usage(scores: Scores) -> PromptUsage:
    usage = scores.usage
    return PromptUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=0,
        cached_tokens=usage.cached_tokens,
        streamed_tokens=usage.streamed_tokens,
        late_tokens=usage.computed_tokens,
        prompt_stream=usage.prompt_stream,
    )
