"""Find the agent that makes a call, and report the call's answer and usage.

*Agent:* AutoGen's ``MessageHandlerContext`` has the id of the agent that handles a message, but
neither the object nor its runtime. Within the handler, the agent may run other agents as tools, and
only the stack shows which agent calls. A tool runs in its own tasks, whose stacks show no agent. So
a context variable, which these tasks inherit, has the tools of the last answer.

*Usage:* the stock client logs an ``LLMCallEvent`` or an ``LLMStreamEndEvent`` with the number of
prompt and answer tokens. A filter of AutoGen's logger adds ``cached_tokens``, ``streamed_tokens``
and ``late_tokens`` to events of this package's client.
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

SCORED_REASON = "its answer is scored, not written"

JsonOutput = bool | type[BaseModel] | None


def calling_agent() -> AgentId | None:
    """Return the AutoGen id of the agent that runs this code, if there is one."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:
        return None


def caller_name() -> str:
    """Return the caller's name for events: its agent's name, or ``"client"`` without an agent.

    AutoGen appends ``_<team id>`` to the names of agents; this removes it.
    """
    agent = calling_agent()
    return agent.type.removesuffix(f"_{agent.key}") if agent is not None else "client"


def is_call_of(member: object) -> bool:
    """Return whether an agent itself is calling, not a tool (maybe another agent) that it uses."""
    tools = _tools.get()
    if tools and tools.agent == calling_agent() and tools.task is not asyncio.current_task():
        return False
    kinds: Any = (BaseChatAgent, BaseTool, Workbench)
    return next((one for one in owners() if isinstance(one, kinds)), member) is member


@dataclass(slots=True)
class Tools:
    """The tool calls of an answer.

    Attributes:
        calls: the calls; AutoGen runs these very objects.
        agent, task: the agent and the task that handle the message.
        iteration: the number of earlier answers with tool calls in the agent's turn.
        on_result: is called at the end of a tool, with the index of its call and the result that
            the agent gets. The result is ``None`` if the tool was cancelled, or raised an exception
            that AutoGen does not handle.
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


# Tasks of tools, and the tasks that they start, inherit this from their agent's task.
_tools: ContextVar[Tools | None] = ContextVar("flashmoa_tools", default=None)


def note_tools(calls: Sequence[FunctionCall]) -> Tools:
    """Note that the agent in this task is about to run tools."""
    earlier = _tools.get()
    tools = Tools(calls, calling_agent(), asyncio.current_task())
    if earlier is not None and earlier.agent == tools.agent:
        if earlier.task is not tools.task:
            return tools  # A tool of the agent has asked a model, which calls other tools.
        tools.iteration = earlier.iteration + 1
    _tools.set(tools)
    return tools


@cache
def observe_tools() -> None:
    """Make ``AssistantAgent`` report each tool's result to :class:`Tools` when the tool ends.

    It runs each tool of an answer in a task, and itself reports the results only when all tools
    have ended. The wrapped method returns results as the agent gets them, whatever runs the tool,
    and replacing it replaces no object of the user's.
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
    """Adds to AutoGen's usage how the engine computed the prompt, in tokens.

    ``prompt_tokens = cached_tokens + late_tokens``. The call's link computed ``streamed_tokens``,
    which are cached tokens, before the call. A count is ``None`` if the engine does not report it.
    """

    cached_tokens: int | None = None
    streamed_tokens: int | None = None
    late_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer that calls tools; its request offered the tools ``offered``."""

    result: CreateResult
    offered: Sequence[Tool | ToolSchema]
    called: Tools


def why_held_back(json_output: JsonOutput, model_info: ModelInfo) -> str | None:
    """Return why others must not get an answer's text while it is written, or ``None``."""
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
    """Report the result to the call's observers. Return it with the engine's usage."""
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
