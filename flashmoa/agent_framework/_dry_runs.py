"""What an executor will ask its model, told by its own code.

A dry run gives a copy of the executor the messages it will receive, with stand-ins for the texts
that are still being written, and ends where it asks a model. Nothing of the workflow is changed,
nothing is sent, and neither middleware nor telemetry sees it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
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
    InMemoryHistoryProvider,
    InProcRunnerContext,
    Message,
    RawAgent,
    Workflow,
    WorkflowContext,
)

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._requests import Captured, Request, listening
from flashmoa.errors import FlashMoAError

# A stock agent's run past the layers that trace it.
_run_untraced: Any = cast("Any", RawAgent).run
_STOCK_RUNS: Any = (cast("Any", Agent).run, _run_untraced)


class NotForecastable(FlashMoAError):
    """Raised when an executor's next prompt cannot be known; says why."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What came of one; ``heard``: the conversation an agent had before it."""

    request: Request
    heard: list[Message]


def client_of(executor: Executor) -> FlashMoAChatClient | None:
    """The FlashMoA client of an executor's agent, if it has one."""
    agent = executor.agent if isinstance(executor, AgentExecutor) else None
    client = getattr(agent, "client", None)
    return client if isinstance(client, FlashMoAChatClient) else None


def heard_by(executor: Executor) -> list[Message]:
    """The conversation that an agent is given, while it is being run."""
    return list(executor._cache) if isinstance(executor, AgentExecutor) else []


def response(executor: Executor, heard: Sequence[Message], text: str) -> AgentExecutorResponse:
    """What an agent sends on when it has answered with ``text``.

    Args:
        heard: the conversation before.

    Raises: NotForecastable where that may be something else than its model's text.
    """
    if problem := rewrites(executor):
        raise NotForecastable(problem)
    name = cast("AgentExecutor", executor).agent.name
    answer = Message("assistant", [text], author_name=name)
    return AgentExecutorResponse(
        executor.id, AgentResponse(messages=[answer]), full_conversation=[*heard, answer]
    )


def rewrites(executor: Executor) -> str | None:
    """Why what others get of an executor is not the text its model answers with, if so."""
    if type(executor) is not AgentExecutor:
        return f"{executor.id} is no AgentExecutor but a {type(executor).__name__}"
    return _odd(executor.agent)


async def dry_run(
    workflow: Workflow, executor: Executor, message: Any, sources: Sequence[str], included: bool
) -> DryRun:
    """Run an executor on ``message``, up to the call of its model.

    Args:
        sources: whom the message is from.
        included: whether the user vouches for code of their own.

    Raises:
        NotForecastable: a dry run could have effects, or would not tell.
    """
    if not included:
        if type(executor) is not AgentExecutor:
            raise NotForecastable(
                f"it is code of your own; include=[{executor.id!r}] has it run on a copy, up to "
                "the call of its model, to tell its prompt"
            )
        if problem := _odd(executor.agent):
            raise NotForecastable(problem)
        if client_of(executor) is None:
            raise NotForecastable("it has no FlashMoAChatClient")
    shadow = _shadow(executor, included)
    handle = _handler(shadow, message)
    try:
        with listening():
            await handle(message, _context(workflow, shadow, sources))
    except Captured as captured:
        return DryRun(captured.request, heard_by(shadow))
    except Exception as error:
        raise NotForecastable(f"it fails on a copy: {error!r}") from error
    raise NotForecastable("it goes on without asking its model")


def _odd(agent: Any) -> str | None:
    """Why an agent's prompt or message may be something else than its instructions, history and
    its model's text; asking what it has more could cost or change something."""
    if getattr(cast("Any", type(agent)), "run", None) not in _STOCK_RUNS:
        return f"it is no stock Agent but a {type(agent).__name__}"
    if agent.middleware:
        return "it has middleware"
    if any(type(one) is not InMemoryHistoryProvider for one in agent.context_providers):
        return "it has context providers"
    if agent.mcp_tools:
        return "its MCP servers would have to be asked for their tools"
    return None


def _shadow(executor: Executor, included: bool) -> Executor:
    """A copy that changes nothing but itself; what it holds is shared, but for lists and such."""
    shadow = copy.copy(executor)
    for name, value in list(vars(shadow).items()):
        if isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))
    if isinstance(shadow, AgentExecutor):
        shadow._cache = [_copied(message) for message in shadow._cache]
        shadow._session = copy.copy(shadow._session)
        shadow._session.state = {
            key: dict(cast("dict[Any, Any]", value)) if isinstance(value, dict) else value
            for key, value in shadow._session.state.items()
        }
        agent: Any = copy.copy(shadow._agent)
        if hasattr(agent, "context_providers"):
            agent.context_providers = list(agent.context_providers)
        if not included:
            agent.run = partial(_run_untraced, agent)
        shadow._agent = agent
    return shadow


def _copied(message: Message) -> Message:
    one = copy.copy(message)
    one.contents = list(message.contents)
    one.additional_properties = dict(message.additional_properties)
    return one


def _handler(shadow: Executor, message: Any) -> Callable[[Any, Any], Any]:
    try:
        found = shadow._find_handler(message)
    except RuntimeError as error:
        raise NotForecastable(str(error)) from error
    return MethodType(found.__func__, shadow) if inspect.ismethod(found) else found


def _context(workflow: Workflow, shadow: Executor, sources: Sequence[str]) -> Any:
    """What a handler is given: the run's state as a copy, and nobody who hears."""
    state = copy.copy(workflow._runner.state)
    for name, value in list(vars(state).items()):
        if isinstance(value, dict):
            setattr(state, name, dict(cast("dict[Any, Any]", value)))
    nobody = InProcRunnerContext()
    nobody.set_runtime_tools(workflow._runner.context.get_runtime_tools())
    return WorkflowContext(shadow, list(sources), state, nobody)
