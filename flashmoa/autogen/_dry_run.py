"""Dry runs: learn the next model call of an agent or manager by running AutoGen's code on a copy.

The copy is shallow, with a cloned model context and a client that stops the run at its first call.
It is given the messages the agent already has and placeholders for those still being written, so it
builds its prompt as the agent will. The team itself is not changed.

Some things are unknown beforehand: the order in which parallel agents finish, what a memory finds.
Then there is one dry run for each possibility, and only the beginning of all their prompts is used.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import BaseChatMessage
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import (
    MagenticOneOrchestrator,
)
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryQueryResult, UpdateContextResult
from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
)
from autogen_core.tools import BaseTool, StaticWorkbench

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._model_call import ToolAnswer
from flashmoa.autogen._stock import (
    AGENTS,
    CONTEXTS,
    WORKBENCHES,
    client_of,
    is_stock,
    require_no_team,
    require_stock,
    require_stock_message,
    require_stock_methods,
)
from flashmoa.linking.forecasts import name_calls
from flashmoa.linking.placeholders import NotForecastable
from flashmoa.scoring import Scores


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The arguments of one call of a model client; ``options`` are those that are rarely given."""

    messages: list[LLMMessage]
    tools: list[Any]
    options: Mapping[str, Any]


# The arguments of a call, besides its messages and tools, that may change its prompt.
_RENDERED_OPTIONS = ("tool_choice", "extra_create_args", "is_scored")
_ASKS_WORKBENCH = "predicting its prompt would ask its workbench for tools, which may have effects"
# Given the messages that an agent receives until its turn, returns the call it will make then.
# Raises NotForecastable if it would make none, or if its model context cannot be copied.
DryRun = Callable[[Sequence[BaseChatMessage]], Awaitable[ModelCall]]


class _CallCaptured(Exception):
    """Ends a dry run at its first model call, and carries that call out of it."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _CapturingClient:
    """Stands in for a model client; raises the first call as :class:`_CallCaptured`."""

    def __init__(self, real: FlashMoAChatCompletionClient) -> None:
        self.model_info = real.model_info

    async def create(
        self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **more: Any
    ) -> CreateResult:
        raise _captured(messages, tools, more)

    async def create_stream(
        self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **more: Any
    ) -> AsyncGenerator[Any]:
        raise _captured(messages, tools, more)
        yield  # pragma: no cover - makes this a generator

    async def score(self, messages: Sequence[LLMMessage], *_: Any, **__: Any) -> Scores:
        raise _captured(messages, (), {"is_scored": True})


def _captured(
    messages: Sequence[LLMMessage], tools: Sequence[Any], more: Mapping[str, Any]
) -> _CallCaptured:
    options = {name: more[name] for name in _RENDERED_OPTIONS if name in more}
    return _CallCaptured(ModelCall(list(messages), list(tools), options))


class _UnknownMemory:
    """Stands in for a memory that has found something unknown."""

    async def update_context(self, model_context: ChatCompletionContext) -> UpdateContextResult:
        await model_context.add_message(SystemMessage(content="?"))
        return UpdateContextResult(memories=MemoryQueryResult(results=[]))


class _FinishedTeam:
    """Stands in for a team whose run consisted of these messages."""

    def __init__(self, messages: Sequence[BaseChatMessage]) -> None:
        self._messages = messages

    async def run_stream(self, **_: Any) -> AsyncGenerator[BaseChatMessage | TaskResult]:
        for message in self._messages:
            yield message
        yield TaskResult(messages=self._messages)


def agent_dry_runs(
    agent: Any, received: Sequence[BaseChatMessage], included: bool = False
) -> list[DryRun]:
    """Return dry runs of an agent's next turn; two if its memory may or may not find something.

    Args:
        received: messages it has received since its last turn.
        included: whether the user listed the agent in ``include``, i.e. allows its own
            (non-AutoGen) code to be run.

    Raises: NotForecastable if the agent has no FlashMoA client or has a team, which a dry run would
        run, or if it is not included and a dry run would run code that is not AutoGen's own.
    """
    client = make_capturing_client(agent, included)
    require_no_team(agent)
    if not included:
        _require_stock_agent(agent)
        for message in received:
            require_stock_message(message)

    def make_dry_run(memory: Any) -> DryRun:
        async def run(future: Sequence[BaseChatMessage]) -> ModelCall:
            shadow = _make_shadow(agent, client, memory)
            return await _call_of_turn(shadow, [*received, *future])

        return run

    return [make_dry_run(memory) for memory in _memory_alternatives(agent)]


def manager_dry_runs(manager: Any) -> list[DryRun]:
    """Return dry runs of a manager's own next call.

    Raises: NotForecastable if the manager has no FlashMoA client, or is of an unknown class.
    """
    client = make_capturing_client(manager, included=False)
    if is_stock(manager, SelectorGroupChatManager):
        return [lambda future: _dry_run_selector(manager, client, future)]
    if is_stock(manager, MagenticOneOrchestrator):
        return [lambda future: _dry_run_orchestrator(manager, client, future)]
    raise NotForecastable(f"{type(manager).__name__} is not a stock manager")


def summary_dry_run(
    agent: SocietyOfMindAgent, said: Sequence[BaseChatMessage], included: bool = False
) -> DryRun:
    """Return a dry run of the call with which an agent sums up what its inner team has said.

    Args:
        said: messages of the inner team's run so far.
        included: see :func:`agent_dry_runs`.

    Raises: NotForecastable, see :func:`agent_dry_runs`.
    """
    client = make_capturing_client(agent, included)
    if not included:
        require_stock(agent, SocietyOfMindAgent)
        for message in said:
            require_stock_message(message)

    async def run(future: Sequence[BaseChatMessage]) -> ModelCall:
        shadow: Any = copy.copy(agent)
        shadow._model_client = client
        # Earlier messages go to the inner team only, and never into the prompt of the summary.
        shadow._model_context = UnboundedChatCompletionContext()
        shadow._team = _FinishedTeam([*said, *future])
        return await _call_of_turn(shadow, [])

    return run


def make_capturing_client(caller: Any, included: bool) -> _CapturingClient:
    client = client_of(caller)
    if client is None:
        raise NotForecastable("it has no FlashMoAChatCompletionClient")
    if not included:
        require_stock_methods(client, FlashMoAChatCompletionClient)
    return _CapturingClient(client)


def _require_stock_agent(agent: Any) -> None:
    """Check an agent and what it holds.

    Raises: NotForecastable if a dry run would run code that is not AutoGen's own.
    """
    if type(agent) not in AGENTS:
        raise NotForecastable(f"it is a {type(agent).__name__}, not a stock AssistantAgent")
    require_stock(agent, *AGENTS)
    if isinstance(agent, MessageFilterAgent):
        _require_stock_agent(agent._wrapped_agent)
    elif isinstance(agent, AssistantAgent):
        for workbench in agent._workbench:
            if not isinstance(workbench, StaticWorkbench):
                raise NotForecastable(_ASKS_WORKBENCH)
            require_stock(workbench, *WORKBENCHES)
            for tool in workbench._tools:
                require_stock_methods(tool, BaseTool)
        for tool in agent._handoff_tools:
            require_stock_methods(tool, BaseTool)


def _memory_alternatives(agent: Any) -> list[Any]:
    """Return the values of the agent's ``_memory`` to try, one for each dry run."""
    if isinstance(agent, MessageFilterAgent):
        return _memory_alternatives(agent._wrapped_agent)
    memories: Sequence[Any] | None = getattr(agent, "_memory", None)
    if not memories:
        return [None]
    # ListMemory only returns what it holds, so the copy may use it. Querying any other memory may
    # cost something or change it: try once with nothing found and once with something.
    if all(is_stock(memory, ListMemory) for memory in memories):
        return [list(memories)]
    return [None, [_UnknownMemory()]]


def _make_shadow(agent: Any, client: _CapturingClient, memory: Any) -> Any:
    """Return a copy of an agent that can take its turn without changing the agent."""
    shadow: Any = copy.copy(agent)
    if isinstance(agent, MessageFilterAgent):
        shadow._wrapped_agent = _make_shadow(agent._wrapped_agent, client, memory)
        return shadow
    shadow._model_client = client
    if is_stock(agent, AssistantAgent):
        shadow._model_context = clone_context(agent._model_context)
        shadow._memory = memory
    else:  # The attributes of any other class are unknown.
        _detach_containers(shadow)
    return shadow


def _detach_containers(shadow: Any) -> None:
    """Give the copy its own model contexts, lists, dicts and sets; their items stay shared."""
    for name, value in list(cast("dict[str, Any]", vars(shadow)).items()):
        if isinstance(value, ChatCompletionContext):
            setattr(shadow, name, clone_context(value))
        elif isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))


def clone_context(context: Any) -> Any:
    if not is_stock(context, *CONTEXTS):
        raise NotForecastable(
            f"its {type(context).__name__} chooses messages by rules that a text still being "
            "written can change"
        )
    clone = copy.copy(context)
    clone._messages = list(context._messages)
    return clone


async def _call_of_turn(shadow: Any, messages: Sequence[BaseChatMessage]) -> ModelCall:
    return await first_call(_drain(shadow.on_messages_stream(messages, CancellationToken())))


async def first_call(run: Awaitable[object]) -> ModelCall:
    """Return the first model call of a run that uses a :class:`_CapturingClient`.

    Raises: NotForecastable if the run ends without one.
    """
    try:
        await run
    except _CallCaptured as captured:
        return captured.call
    raise NotForecastable("its dry run ended without a call of its model")


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
    """Return the request that an agent makes after the tools of its answer, if it makes one.

    Call this while the agent still waits for the answer: its context is read.

    Args:
        included: see :func:`agent_dry_runs`.

    Raises: NotForecastable, see :func:`agent_dry_runs`.
    """
    subject: Any = agent
    calls = answer.called.calls
    iterates = answer.called.iteration < subject._max_tool_iterations - 1
    hands_off = any(call.name in subject._handoffs for call in calls)
    client = client_of(agent)
    if client is None or hands_off or not (iterates or subject._reflect_on_tool_use):
        return None
    for tool in answer.offered:
        if not included and not isinstance(tool, dict):
            require_stock_methods(tool, BaseTool)
    context = clone_context(subject._model_context)
    more: dict[str, Any] = {"message_id": ""} if iterates else {"inner_messages": []}
    ask = partial(
        subject._call_llm if iterates else subject._reflect_on_tool_use_flow,
        model_client=make_capturing_client(agent, included),
        model_client_stream=False,
        system_messages=subject._system_messages,
        # The tools were listed for the answer's request; the workbench is not asked again.
        workbench=[],
        handoff_tools=list(answer.offered),
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

    return OwnRequest(client, name_calls([call.name for call in calls]), dry_run)


def _messages_of_iteration(
    agent: str, answer: ToolAnswer, results: Sequence[str]
) -> list[AssistantMessage | FunctionExecutionResultMessage]:
    """Return what an agent adds to its context for an answer that calls tools."""
    thought = answer.result.thought
    executed = [
        FunctionExecutionResult(content=text, call_id=call.id, is_error=False, name=call.name)
        for call, text in zip(answer.called.calls, results, strict=True)
    ]
    return [
        AssistantMessage(content=list(answer.called.calls), source=agent, thought=thought),
        FunctionExecutionResultMessage(content=executed),
    ]


async def _drain(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass


async def _dry_run_selector(
    manager: Any, client: _CapturingClient, future: Sequence[BaseChatMessage]
) -> ModelCall:
    """Return the call with which a selector chooses the next speaker after these messages."""
    shadow: Any = copy.copy(manager)
    shadow._model_client = client
    shadow._model_context = clone_context(manager._model_context)
    shadow._message_thread = list(manager._message_thread)
    await shadow.update_message_thread(future)
    return await first_call(shadow.select_speaker(shadow._message_thread))


async def _dry_run_orchestrator(
    manager: Any, client: _CapturingClient, future: Sequence[BaseChatMessage]
) -> ModelCall:
    """Return the call with which MagenticOne's orchestrator updates its ledger after these."""
    shadow: Any = copy.copy(manager)
    shadow._model_client = client
    shadow._message_thread = [*manager._message_thread, *future]
    # Messages that the copy publishes must not reach the team's output.
    shadow._output_message_queue = asyncio.Queue()
    return await first_call(shadow._orchestrate_step(CancellationToken()))
