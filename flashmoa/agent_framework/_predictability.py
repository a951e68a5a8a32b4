"""Tell which prompts can be predicted, and which agents' texts others get unchanged, or why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agent_framework import (
    Agent,
    AgentExecutor,
    BaseAgent,
    Executor,
    FunctionalWorkflow,
    FunctionalWorkflowAgent,
    InMemoryHistoryProvider,
    RawAgent,
    Workflow,
    WorkflowAgent,
    WorkflowExecutor,
    normalize_tools,
)
from agent_framework._mcp import MCPTool
from agent_framework._workflows._const import (
    RESOLVED_WORKFLOW_RUN_KWARGS_KEY,
    WORKFLOW_RUN_KWARGS_KEY,
)

from flashmoa.agent_framework._client import FlashMoAChatClient

# A stock agent's ``run`` without the layers that trace it.
run_untraced: Any = cast("Any", RawAgent).run
_STOCK_RUNS: Any = (cast("Any", Agent).run, run_untraced)

_ASKS_SERVERS = "predicting its prompt would ask its MCP servers for their tools"

# Executors of the framework that ask no model, and those that run code of the user's.
_WITHOUT_MODEL = (
    "_AggregateAgentConversations",
    "AgentRequestInfoExecutor",
    "_TerminalAgentRequestInfoExecutor",
)
_WITH_USER_CODE = ("_CallbackAggregator", "FunctionExecutor")

# What a client's request and its text depend on.
_CLIENT_METHODS = (
    "get_response",
    "_inner_get_response",
    "_prepare_options",
    "_prepare_messages_for_openai",
    "_prepare_tools_for_openai",
    "_parse_response_from_openai",
    "_parse_response_update_from_openai",
)

_WORKFLOWS = (
    Workflow,
    WorkflowAgent,
    WorkflowExecutor,
    FunctionalWorkflow,
    FunctionalWorkflowAgent,
)


def client_of(executor: Executor) -> FlashMoAChatClient | None:
    """Return the FlashMoA client of an executor's agent, if it has one."""
    agent = executor.agent if isinstance(executor, AgentExecutor) else None
    client = getattr(agent, "client", None)
    return client if isinstance(client, FlashMoAChatClient) else None


def holds_workflow(executor: Executor) -> bool:
    """Return whether an executor, or an agent that it holds, holds a workflow or is one."""
    held: list[Any] = [executor, *vars(executor).values()]
    for each in list(held):
        if isinstance(each, BaseAgent):
            held += vars(each).values()
    return any(isinstance(each, _WORKFLOWS) for each in held)


def asks_no_model(executor: Executor) -> bool:
    """Return whether an executor is one of the framework's that never asks a model."""
    return _is_stock(executor) and type(executor).__name__ in _WITHOUT_MODEL


def why_not_run(workflow: Workflow, executor: Executor) -> str | None:
    """Return why no dry run of an executor can be made, if none can.

    A dry run must neither run code of the user's nor ask a server.
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
    """Return why the message that others get may differ from its model's text, if it may."""
    if type(executor) is not AgentExecutor:
        return f"{executor.id} is a {type(executor).__name__}, not an AgentExecutor"
    return _why_unpredictable(workflow, executor)


def why_call_unpredictable(client: FlashMoAChatClient, arguments: Mapping[str, Any]) -> str | None:
    """Return why a request may differ from what a client was asked to send, if it may.

    Args:
        arguments: the keyword arguments of the client's ``get_response``.
    """
    for name in _CLIENT_METHODS:
        stock = getattr(FlashMoAChatClient, name)
        if name in vars(client) or getattr(type(client), name) is not stock:
            return f"{type(client).__name__}.{name}, which its client has, is not FlashMoA's own"
    client_kwargs: Mapping[str, Any] = arguments.get("client_kwargs") or {}
    if client.chat_middleware:
        return "its client has middleware"
    if arguments.get("middleware") or client_kwargs.get("middleware"):
        return "its request has middleware"
    if client.compaction_strategy or arguments.get("compaction_strategy"):
        return "it has a compaction strategy"
    return None


def _why_no_agent(executor: Executor) -> str:
    name = type(executor).__name__
    if _is_stock(executor) and name not in _WITH_USER_CODE:
        return f"it is a {name} of Agent Framework, which is not linked"
    return "it is code of your own, which is not run to predict its prompt"


def _is_stock(executor: Executor) -> bool:
    # The framework's packages are agent_framework, agent_framework_orchestrations, ...
    return type(executor).__module__.startswith("agent_framework")


def _why_unpredictable(workflow: Workflow, executor: AgentExecutor) -> str | None:
    """Return why an agent's prompt may have parts that are unknown beforehand, if it may.

    Known are its instructions and its history. To query anything else that it holds may cost or
    change something, and may make the agent send others a text that is not its model's.
    """
    agent: Any = executor.agent
    if getattr(cast("Any", type(agent)), "run", None) not in _STOCK_RUNS or "run" in vars(agent):
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
    """Return what the workflow's run gives to the client of an agent."""
    state = workflow._runner.state
    raw = state.get(WORKFLOW_RUN_KWARGS_KEY, {})
    return executor._prepare_agent_run_args(raw, state.get(RESOLVED_WORKFLOW_RUN_KWARGS_KEY))[1]
