"""Dry runs: learn an agent's next request by running the framework's own code on a copy.

A dry run gives a copy of the agent's executor the messages it will receive, with placeholders for
the texts that are still being written, and ends at its first request to a model. No request is
sent, the workflow is not changed, and neither middleware nor telemetry sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._predictability import (
    run_untraced,
    why_call_unpredictable,
    why_not_run,
)
from flashmoa.engine import kv_namespace, prompt_fields
from flashmoa.linking.placeholders import NotForecastable


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Holds a chat completion request of a client.

    Attributes:
        body: the body that the client would send.
        arguments: the keyword arguments of ``get_response``.
    """

    client: FlashMoAChatClient
    body: Mapping[str, Any]
    arguments: Mapping[str, Any]

    async def render(self) -> str:
        """Return the text of its prompt, as its engine's chat template renders it.

        Raises: EngineError if the engine cannot be reached or refuses.
        """
        sent = self._sent
        return await self.client.engine.render(sent["messages"], **prompt_fields(sent))

    @property
    def namespace(self) -> dict[str, str]:
        """Return the namespace of its KV."""
        return kv_namespace(self._sent)

    @property
    def _sent(self) -> Mapping[str, Any]:
        """Return what the server receives: OpenAI's client adds the extra body to the body."""
        return {**self.body, **(self.body.get("extra_body") or {})}


class _RequestCaptured(Exception):
    """Ends a dry run at its first request, and carries that request out of it."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__("a dry run ends here")
        self.request = request


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
    whole = [*map(_copy_message, conversation), answer]
    return AgentExecutorResponse(
        executor.id, AgentResponse(messages=[answer]), full_conversation=whole
    )


async def dry_run(
    workflow: Workflow, executor: Executor, message: Any, sources: Sequence[str]
) -> DryRunResult:
    """Run a copy of an agent's executor on ``message``, up to its first request to a model.

    Args:
        sources: ids of the executors that sent the message.

    Raises: NotForecastable if the executor must not be run (:func:`why_not_run`), if its run fails
        or ends without a request, or if the request may be changed before it is sent.
    """
    if reason := why_not_run(workflow, executor):
        raise NotForecastable(reason)
    shadow = _copy_executor(cast("AgentExecutor", executor))
    try:
        handle = shadow._find_handler(message)
    except RuntimeError as error:
        raise NotForecastable(str(error)) from error
    # A handler in the copied containers is bound to the original.
    handle = MethodType(cast("Any", handle).__func__, shadow)
    try:
        await handle(message, _make_context(workflow, shadow, sources))
    except _RequestCaptured as captured:
        request = captured.request
    except Exception as error:
        raise NotForecastable(f"its dry run on a copy failed: {error!r}") from error
    else:
        raise NotForecastable("its dry run ended without a call of its model")
    if reason := why_call_unpredictable(request.client, request.arguments):
        raise NotForecastable(reason)
    return DryRunResult(request, get_conversation(shadow))


def _copy_executor(executor: AgentExecutor) -> AgentExecutor:
    """Copy an executor and all that the framework's code changes when its agent is run.

    The copy's agent is run without the layers that trace it, and its client raises its first
    request as :class:`_RequestCaptured`.
    """
    shadow = copy.copy(executor)
    for name, value in list(vars(shadow).items()):
        if isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))
    shadow._cache = [_copy_message(message) for message in shadow._cache]
    shadow._session = copy.copy(shadow._session)
    shadow._session.state = {
        key: dict(cast("dict[Any, Any]", value)) if isinstance(value, dict) else value
        for key, value in shadow._session.state.items()
    }
    agent: Any = copy.copy(shadow._agent)
    agent.context_providers = list(agent.context_providers)
    agent.run = partial(run_untraced, agent)
    agent.client = _capturing(agent.client)
    shadow._agent = agent
    return shadow


def _capturing(client: FlashMoAChatClient) -> FlashMoAChatClient:
    def get_response(messages: Sequence[Message], **arguments: Any) -> Any:
        body = client._prepare_options(messages, arguments.get("options") or {})
        raise _RequestCaptured(ChatRequest(client, body, arguments))

    shadow: Any = copy.copy(client)
    shadow.get_response = get_response
    return shadow


def _copy_message(message: Message) -> Message:
    """Copy a message; its contents stay shared."""
    clone = copy.copy(message)
    clone.contents = list(message.contents)
    clone.additional_properties = dict(message.additional_properties)
    return clone


def _make_context(workflow: Workflow, shadow: Executor, sources: Sequence[str]) -> Any:
    """Return a context for a handler, with a copy of the run's state and no receivers."""
    state = copy.copy(workflow._runner.state)
    for name, value in list(vars(state).items()):
        if isinstance(value, dict):
            setattr(state, name, dict(cast("dict[Any, Any]", value)))
    runner_context = InProcRunnerContext()
    runner_context.set_runtime_tools(workflow._runner.context.get_runtime_tools())
    return WorkflowContext(shadow, list(sources), state, runner_context)
