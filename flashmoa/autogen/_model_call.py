"""Decide whether a call's text may be streamed; add its usage to the result and to log events.

The stock client logs an ``LLMCallEvent`` or an ``LLMStreamEndEvent`` from within its methods, with
the number of prompt and answer tokens. A filter of its logger adds ``cached_tokens``,
``streamed_tokens`` and ``late_tokens`` to that event; events of other clients pass as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autogen_core import EVENT_LOGGER_NAME, CancellationToken
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel

from flashmoa.autogen._callers import Tools, note_tools
from flashmoa.engine import PromptUsage
from flashmoa.linking.calls import CallResult, ObservedCall, current_call
from flashmoa.scoring import Candidate, Scorer, Scores

# Why the answer of a scoring call does not reach other agents as it is written.
SCORED_REASON = "its answer is scored, not written"

JsonOutput = bool | type[BaseModel] | None


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


def why_held_back(
    tools: Sequence[Tool | ToolSchema],
    json_output: JsonOutput,
    model_info: ModelInfo,
    *,
    is_stream: bool = False,
) -> str | None:
    """Return why an answer's text must not reach other agents as it arrives, if it must not.

    Args:
        is_stream: whether AutoGen itself requests the answer as a stream. Servers parse tool calls
            in a stream in another way than in a whole answer, so only then may the answer of a call
            with tools be read as a stream.
    """
    if tools and not is_stream:
        return "it has tools, and its answer is not requested as a stream (model_client_stream)"
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
    scorer: Scorer,
    messages: Sequence[Mapping[str, Any]],
    candidates: Sequence[Candidate],
    length_normalised: bool,
    cancellation_token: CancellationToken | None,
) -> Scores:
    """Score candidates within a call; see :meth:`FlashMoAChatCompletionClient.score`."""
    with call:
        call.send({"messages": messages, "chat_template_kwargs": scorer.template_args})
        request = asyncio.ensure_future(
            scorer.score(
                messages,
                candidates,
                length_normalised=length_normalised,
                prompt_stream_id=call.prompt_stream_id,
            )
        )
        if cancellation_token is not None:
            cancellation_token.link_future(request)
        try:
            scores = await request
        finally:
            request.cancel()
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
