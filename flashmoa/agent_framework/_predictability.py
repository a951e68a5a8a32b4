"""Tell which prompts can be predicted, and which agents' texts others get unchanged, or why not."""

from __future__ import annotations

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
)

from flashmoa.agent_framework._client import FlashMoAChatClient

# A stock agent's ``run`` without the layers that trace it.
run_untraced: Any = cast("Any", RawAgent).run
_STOCK_RUNS: Any = (cast("Any", Agent).run, run_untraced)

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


def why_not_run(executor: Executor, included: bool) -> str | None:
    """Return why no dry run of an executor can be made, if none can.

    Without ``included``, a dry run must neither run code of the user's nor ask a server.
    """
    if holds_workflow(executor):
        return "it runs a workflow, and a copy would run the same one; link that workflow itself"
    if included:
        return None
    if type(executor) is not AgentExecutor:
        return _why_no_agent(executor)
    if reason := _why_unpredictable(executor.agent):
        return reason
    if executor._context_mode == "custom":
        return (
            f"its context_filter is code of your own; with include=[{executor.id!r}], it is run on "
            "copies of the messages, to predict its prompt"
        )
    if client_of(executor) is None:
        return "its client is not a FlashMoAChatClient; give it one"
    return None


def why_rewritten(executor: Executor) -> str | None:
    """Return why the message that others get may differ from its model's text, if it may."""
    if type(executor) is not AgentExecutor:
        return f"{executor.id} is a {type(executor).__name__}, not an AgentExecutor"
    return _why_unpredictable(executor.agent)


def sends_model_text(executor: Executor) -> bool:
    """Return whether the message that others get of an executor is its model's text."""
    return why_rewritten(executor) is None


def _why_no_agent(executor: Executor) -> str:
    return (
        f"it is code of your own; with include=[{executor.id!r}], a copy of it is run up to its "
        "model call, to predict its prompt"
    )


def _why_unpredictable(agent: Any) -> str | None:
    """Return why an agent's prompt may have parts that are unknown beforehand, if it may.

    Known are its instructions and its history. To query anything else that it holds may cost or
    change something, and may make the agent send others a text that is not its model's.
    """
    if getattr(cast("Any", type(agent)), "run", None) not in _STOCK_RUNS:
        return f"it is a {type(agent).__name__}, not a stock Agent"
    if agent.middleware:
        return "it has middleware"
    if any(type(provider) is not InMemoryHistoryProvider for provider in agent.context_providers):
        return "it has context providers other than InMemoryHistoryProvider"
    if agent.mcp_tools:
        return "predicting its prompt would ask its MCP servers for their tools"
    return None
