"""Dry runs: find an agent's next request by running the framework's own code on a copy.

A dry run gives a copy of the agent's executor the messages that it will receive, with placeholders
for texts that are still being written, and ends at its first request to a model. It sends no
request, does not change the workflow, and neither middleware nor telemetry sees it. An agent whose
prompt depends on user-defined code gets a reason instead of a dry run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import getattr_static
from types import MethodType
from typing import Any, cast

from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    AgentResponse,
    BaseAgent,
    Executor,
    FunctionalWorkflow,
    FunctionalWorkflowAgent,
    InMemoryHistoryProvider,
    InProcRunnerContext,
    Message,
    RawAgent,
    Workflow,
    WorkflowAgent,
    WorkflowContext,
    WorkflowExecutor,
    normalize_tools,
)
from agent_framework._mcp import MCPTool
from agent_framework._workflows._const import (
    RESOLVED_WORKFLOW_RUN_KWARGS_KEY,
    WORKFLOW_RUN_KWARGS_KEY,
)

from flashmoa.frameworks import ChatRequest, NotForecastable, RequestCaptured, first_request
from flashmoa.frameworks.agent_framework.client import FlashMoAChatClient

# A stock agent's ``run`` without the layers that trace it.
run_untraced: Any = cast("Any", RawAgent).run

_ASKS_SERVERS = "predicting its prompt would ask its MCP servers for their tools"

# Executors of the framework that ask no model, and executors that run user-defined code.
_WITHOUT_MODEL = (
    "_AggregateAgentConversations",
    "AgentRequestInfoExecutor",
    "_TerminalAgentRequestInfoExecutor",
)
_WITH_USER_CODE = ("_CallbackAggregator", "FunctionExecutor")

# A request and its text depend on methods of the client and the agent whose names begin so.
# Releases of the framework add such methods.
_CLIENT_METHODS = ("get_response", "_inner_", "_prepare_", "_build_", "_parse_")
_AGENT_METHODS = ("run", "_prepare_", "_call_", "_parse_", "_finalize_", "_get_", "_resolve_")
# These change no text, or are declined for another reason.
_OTHER_CODE = {"_parse_usage_from_openai", "tokenizer", "compaction_strategy"}

_WORKFLOWS = (
    Workflow,
    WorkflowAgent,
    WorkflowExecutor,
    FunctionalWorkflow,
    FunctionalWorkflowAgent,
)


def get_conversation(executor: Executor) -> list[Message]:
    """Return the conversation that a running agent was given; empty for any other executor."""
    return list(executor._cache) if isinstance(executor, AgentExecutor) else []


def make_response(
    executor: Executor, conversation: Sequence[Message], text: str
) -> AgentExecutorResponse:
    """Return the message that an agent sends to others after it has answered with ``text``.

    Args:
        executor: an agent that sends others its model's text (see :func:`why_rewritten`).
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
) -> tuple[ChatRequest, list[Message]]:
    """Run a copy of an agent's executor on ``message``, up to its first request to a model.

    Return the request, and the conversation that the agent got.

    Args:
        sources: ids of the executors that sent the message.

    Raises: NotForecastable if the executor must not be run (:func:`why_not_run`), if its run fails
        or ends without a request, or if the request may change before it is sent.
    """
    if reason := why_not_run(workflow, executor):
        raise NotForecastable(reason)
    shadow = _copy_executor(cast("AgentExecutor", executor))
    try:
        handle = shadow._find_handler(message)
    except RuntimeError as error:
        raise NotForecastable(str(error)) from error
    # The copied containers have handlers that are bound to the original.
    handle = MethodType(cast("Any", handle).__func__, shadow)
    try:
        request = await first_request(handle(message, _make_context(workflow, shadow, sources)))
    except NotForecastable:
        raise
    except Exception as error:
        raise NotForecastable(f"its dry run on a copy failed: {error!r}") from error
    return request, get_conversation(shadow)


def _copy_executor(executor: AgentExecutor) -> AgentExecutor:
    """Copy an executor and everything that the framework changes when it runs the agent.

    The copy's agent runs without the layers that trace it, and its client raises its first request
    as :class:`RequestCaptured`.
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
        if reason := why_call_unpredictable(client, arguments):
            raise NotForecastable(reason)
        body = client._prepare_options(messages, arguments.get("options") or {})
        raise RequestCaptured(ChatRequest(client.engine, body))

    shadow: Any = copy.copy(client)
    shadow.get_response = get_response
    return shadow


def _copy_message(message: Message) -> Message:
    """Copy a message and its list of contents."""
    clone = copy.copy(message)
    clone.contents = list(message.contents)
    clone.additional_properties = dict(message.additional_properties)
    return clone


def _make_context(workflow: Workflow, shadow: Executor, sources: Sequence[str]) -> Any:
    """Return a handler's context, with a copy of the run's state and no receivers."""
    state = copy.copy(workflow._runner.state)
    for name, value in list(vars(state).items()):
        if isinstance(value, dict):
            setattr(state, name, dict(cast("dict[Any, Any]", value)))
    runner_context = InProcRunnerContext()
    runner_context.set_runtime_tools(workflow._runner.context.get_runtime_tools())
    return WorkflowContext(shadow, list(sources), state, runner_context)


def client_of(executor: Executor) -> FlashMoAChatClient | None:
    """Return the FlashMoA client of an executor's agent, if it has one."""
    agent = executor.agent if isinstance(executor, AgentExecutor) else None
    client = getattr(agent, "client", None)
    return client if isinstance(client, FlashMoAChatClient) else None


def holds_workflow(executor: Executor) -> bool:
    """Return whether an executor, or an agent in it, has or is a workflow."""
    held: list[Any] = [executor, *vars(executor).values()]
    for each in list(held):
        if isinstance(each, BaseAgent):
            held += vars(each).values()
    return any(isinstance(each, _WORKFLOWS) for each in held)


def asks_no_model(executor: Executor) -> bool:
    """Return whether an executor is the framework's own and never asks a model."""
    return _is_stock(executor) and type(executor).__name__ in _WITHOUT_MODEL


def why_not_run(workflow: Workflow, executor: Executor) -> str | None:
    """Return why an executor gets no dry run, or ``None``.

    A dry run must neither run user-defined code nor ask a server.
    """
    if holds_workflow(executor):
        return "it runs a workflow, and a copy would run the same one; link that workflow itself"
    if type(executor) is not AgentExecutor:
        return _why_no_agent(executor)
    if reason := _why_unpredictable(workflow, executor):
        return reason
    run_tools = workflow._runner.context.get_runtime_tools()
    if any(isinstance(tool, MCPTool) for tool in normalize_tools(run_tools)):
        return _ASKS_SERVERS
    if executor._context_mode == "custom":
        return "its context_filter is code of your own, which is not run to predict its prompt"
    if client_of(executor) is None:
        return "its client is not a FlashMoAChatClient; give it one"
    return None


def why_rewritten(workflow: Workflow, executor: Executor) -> str | None:
    """Return why others may get a message other than its model's text, or ``None``."""
    if type(executor) is not AgentExecutor:
        return f"{executor.id} is a {type(executor).__name__}, not an AgentExecutor"
    return _why_unpredictable(workflow, executor)


def why_call_unpredictable(client: FlashMoAChatClient, arguments: Mapping[str, Any]) -> str | None:
    """Return why a client may change the request before it sends it, or ``None``.

    Args:
        arguments: the keyword arguments of the client's ``get_response``.
    """
    if client.compaction_strategy or arguments.get("compaction_strategy"):
        return "it has a compaction strategy"
    for name in _find_own_code(client, FlashMoAChatClient, _CLIENT_METHODS):
        return f"{type(client).__name__}.{name}, which its client has, is not FlashMoA's own"
    client_kwargs: Mapping[str, Any] = arguments.get("client_kwargs") or {}
    if client.chat_middleware:
        return "its client has middleware"
    if arguments.get("middleware") or client_kwargs.get("middleware"):
        return "its request has middleware"
    return None


def _find_own_code(owner: Any, stock: Any, methods: tuple[str, ...]) -> list[str]:
    """Return the names of an object's user-defined functions.

    They are methods of its class, or set on the object, as hooks are (``message_preparer``).

    Args:
        stock: the framework's or FlashMoA's class of the object.
        methods: beginnings of the names of methods that count.
    """
    names = [name for name in dir(stock) if name.startswith(methods)]
    get, held = cast("Any", getattr_static), cast("dict[str, Any]", vars(owner))
    found = [name for name in names if get(type(owner), name) is not get(stock, name)]
    found += [name for name, value in held.items() if callable(value)]
    return [name for name in found if name not in _OTHER_CODE]


def _why_no_agent(executor: Executor) -> str:
    name = type(executor).__name__
    if _is_stock(executor) and name not in _WITH_USER_CODE:
        return f"it is a {name} of Agent Framework, which is not linked"
    return "it is code of your own, which is not run to predict its prompt"


def _is_stock(executor: Executor) -> bool:
    # The framework's packages are agent_framework, agent_framework_orchestrations, ...
    return type(executor).__module__.startswith("agent_framework")


def _why_unpredictable(workflow: Workflow, executor: AgentExecutor) -> str | None:
    """Return why an agent's prompt may have parts that are unknown beforehand, or ``None``.

    Its instructions and its history are known. Anything else may cost or change something when it
    is queried, and may make the agent send others a text that is not its model's.
    """
    agent: Any = executor.agent
    kinds: tuple[Any, ...] = (Agent, RawAgent)
    stock = next((kind for kind in kinds if isinstance(executor.agent, kind)), None)
    if stock is None or _find_own_code(agent, stock, _AGENT_METHODS):
        return f"it is a {type(agent).__name__}, not a stock Agent"
    if agent.middleware:
        return "it has middleware"
    if any(type(provider) is not InMemoryHistoryProvider for provider in agent.context_providers):
        return "it has context providers other than InMemoryHistoryProvider"
    if agent.mcp_tools:
        return _ASKS_SERVERS
    if agent.require_per_service_call_history_persistence:
        return "its history is loaded again for each request (per-service-call persistence)"
    client = client_of(executor)
    if client is None:
        return None
    arguments = {
        "client_kwargs": _client_kwargs(workflow, executor),
        "compaction_strategy": agent.compaction_strategy,
    }
    return why_call_unpredictable(client, arguments)


def _client_kwargs(workflow: Workflow, executor: AgentExecutor) -> Mapping[str, Any] | None:
    state = workflow._runner.state
    raw = state.get(WORKFLOW_RUN_KWARGS_KEY, {})
    return executor._prepare_agent_run_args(raw, state.get(RESOLVED_WORKFLOW_RUN_KWARGS_KEY))[1]
