"""Dry runs: learn an executor's next request by running its own code on a copy.

A dry run gives a copy of the executor the messages it will receive, with placeholders for the texts
that are still being written, and ends at its first request to a model. No request is sent, and if
all code is the framework's, the workflow is not changed, and neither middleware nor telemetry sees
it. The code of an included executor is run as it is: in a task that was running before the dry run,
or outlives it, its requests are sent.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    AgentResponse,
    Executor,
    InProcRunnerContext,
    Message,
    Workflow,
    WorkflowContext,
)

from flashmoa.agent_framework._capture import RequestCaptured, capture_requests
from flashmoa.agent_framework._client import ChatRequest
from flashmoa.agent_framework._copies import copy_included, copy_message, copy_stock
from flashmoa.agent_framework._predictability import why_call_unpredictable, why_not_run
from flashmoa.linking.placeholders import NotForecastable


class CallsInOtherTask(NotForecastable):
    """Raised when the request of an executor is made in another task than that of its handler.

    No request of the executor will ever be linked, since it cannot be attributed to it.
    """


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """Holds the request that a dry run ended at, and the conversation the agent was given."""

    request: ChatRequest
    conversation: list[Message]


def get_conversation(executor: Executor) -> list[Message]:
    """Return the conversation that a running agent was given; empty for any other executor."""
    return list(executor._cache) if isinstance(executor, AgentExecutor) else []


def make_response(
    executor: Executor, conversation: Sequence[Message], text: str
) -> AgentExecutorResponse:
    """Return the message that an agent sends to others when it has answered with ``text``.

    Args:
        executor: an agent whose model's text others get (see :func:`why_rewritten`).
        conversation: the conversation before the answer.
    """
    agent = cast("Agent", cast("AgentExecutor", executor).agent)
    answer = Message("assistant", [text], author_name=agent._get_agent_name())
    whole = [*map(copy_message, conversation), answer]
    return AgentExecutorResponse(
        executor.id, AgentResponse(messages=[answer]), full_conversation=whole
    )


async def dry_run(
    workflow: Workflow, executor: Executor, message: Any, sources: Sequence[str], included: bool
) -> DryRunResult:
    """Run a copy of an executor on ``message``, up to its first request to a model.

    Args:
        sources: ids of the executors that sent the message.
        included: whether the user listed the executor in ``include``, i.e. allows its user-defined
            code to be run.

    Raises:
        CallsInOtherTask: if its request is made in another task than its handler.
        NotForecastable: if the executor must not be run (:func:`why_not_run`), if its run fails or
            ends without a request, or if the request may be changed before it is sent.
    """
    if reason := why_not_run(workflow, executor, included):
        raise NotForecastable(reason)
    shadow, message = _copy(executor, message, included)
    handle = _find_handler(shadow, message)
    context = _make_context(workflow, shadow, sources)
    request = await _capture_request(partial(handle, message, context))
    if reason := why_call_unpredictable(request.client, request.arguments):
        raise NotForecastable(reason)
    return DryRunResult(request, get_conversation(shadow))


async def _capture_request(handle: Callable[[], Awaitable[object]]) -> ChatRequest:
    """Run a handler up to its first request, and return that."""
    failure: Exception | None = None
    with capture_requests() as capture:
        try:
            await handle()
        except Exception as error:
            failure = error
    if capture.was_in_other_task:
        raise CallsInOtherTask(
            "it calls its model in a task of its own (asyncio.gather, TaskGroup, a thread, a "
            "worker), where FlashMoA cannot tell whose call it is; await the call itself to have "
            "it linked"
        )
    if failure is None:
        raise NotForecastable("its dry run ended without a call of its model")
    if (captured := _find_captured(failure)) is None:
        raise NotForecastable(f"its dry run on a copy failed: {failure!r}") from failure
    return cast("ChatRequest", captured.request)


def _find_captured(failure: BaseException) -> RequestCaptured | None:
    """Return what ended a dry run if it was a request, also if a task group has wrapped it."""
    while isinstance(failure, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", failure)
        if len(group.exceptions) != 1:
            return None
        failure = group.exceptions[0]
    return failure if isinstance(failure, RequestCaptured) else None


def _copy(executor: Executor, message: Any, included: bool) -> tuple[Executor, Any]:
    """Return copies of an executor and its message, which its run may change."""
    if not included:
        return copy_stock(cast("AgentExecutor", executor)), message
    try:
        return copy_included(executor, message)
    except Exception as error:
        raise NotForecastable(f"it cannot be copied for a dry run: {error!r}") from error


def _find_handler(shadow: Executor, message: Any) -> Callable[[Any, Any], Any]:
    try:
        handler = shadow._find_handler(message)
    except RuntimeError as error:
        raise NotForecastable(str(error)) from error
    # A handler in the copied containers is bound to the original.
    return MethodType(handler.__func__, shadow) if inspect.ismethod(handler) else handler


def _make_context(workflow: Workflow, shadow: Executor, sources: Sequence[str]) -> Any:
    """Return a context for a handler, with a copy of the run's state and no receivers."""
    state = copy.copy(workflow._runner.state)
    for name, value in list(vars(state).items()):
        if isinstance(value, dict):
            setattr(state, name, dict(cast("dict[Any, Any]", value)))
    runner_context = InProcRunnerContext()
    runner_context.set_runtime_tools(workflow._runner.context.get_runtime_tools())
    return WorkflowContext(shadow, list(sources), state, runner_context)
