"""Dry runs: what an agent or a manager will ask its model next, told by AutoGen's own code.

A shallow copy of the agent, with a cloned model context and a client that only listens, is given
the messages the agent already has and placeholders for those still being written. The copy builds
its prompt as the agent will; nothing of the team is changed.

Where it is not certain what will be there (agents that write at the same time finish in any
order, memory adds what it finds), several dry runs are made, and what their prompts have in
common is certain.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
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
from autogen_core.models import CreateResult, LLMMessage, SystemMessage
from autogen_core.tools import BaseTool, StaticWorkbench

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._stock import (
    AGENTS,
    CONTEXTS,
    client_of,
    own_code,
    require_stock,
    require_stock_message,
)
from flashmoa.linking.placeholders import NotForecastable
from flashmoa.scoring import Scores


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a model client was asked."""

    messages: list[LLMMessage]
    tools: list[Any]


# Given what an agent will have received by then, returns the call it will make.
DryRun = Callable[[Sequence[BaseChatMessage]], Awaitable[ModelCall]]


class _Captured(Exception):
    """Carries a call out of a dry run."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _ListeningClient:
    """Stands in for a model client and stops the run at its first call."""

    def __init__(self, real: FlashMoAChatCompletionClient) -> None:
        self.model_info = real.model_info

    async def create(
        self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **_: Any
    ) -> CreateResult:
        raise _Captured(ModelCall(list(messages), list(tools)))

    async def create_stream(
        self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **_: Any
    ) -> AsyncGenerator[Any]:
        raise _Captured(ModelCall(list(messages), list(tools)))
        yield  # pragma: no cover - makes this a generator

    async def score(self, messages: Sequence[LLMMessage], *_: Any, **__: Any) -> Scores:
        raise _Captured(ModelCall(list(messages), []))


class _Found:
    """A memory that found something unknown."""

    async def update_context(self, model_context: ChatCompletionContext) -> UpdateContextResult:
        await model_context.add_message(SystemMessage(content="?"))
        return UpdateContextResult(memories=MemoryQueryResult(results=[]))


class _Spoken:
    """A team that has said this and no more."""

    def __init__(self, messages: Sequence[BaseChatMessage]) -> None:
        self._messages = messages

    async def run_stream(self, **_: Any) -> AsyncGenerator[BaseChatMessage | TaskResult]:
        for message in self._messages:
            yield message
        yield TaskResult(messages=self._messages)


def agent_dry_runs(
    agent: Any, received: Sequence[BaseChatMessage], included: bool = False
) -> list[DryRun]:
    """Return dry runs of an agent's next turn; two where its memory may find something or not.

    Args:
        received: messages it has received since its last turn.
        included: whether the user vouches for an agent that is no stock one.

    Raises:
        NotForecastable: a dry run could have effects, or would not reach the model.
    """
    listening = _listening(agent, included)
    if not included:
        _require_stock_agent(agent)
        for message in received:
            require_stock_message(message)

    def dry_run(memory: Any) -> DryRun:
        async def run(future: Sequence[BaseChatMessage]) -> ModelCall:
            shadow = _shadow(agent, listening, memory)
            return await _captured(shadow, [*received, *future])

        return run

    return [dry_run(memory) for memory in _memories(agent)]


def manager_dry_runs(manager: Any) -> list[DryRun]:
    """Return dry runs of a manager's own next call. Raises: NotForecastable."""
    listening = _listening(manager, included=False)
    if not own_code(manager, SelectorGroupChatManager):
        return [lambda future: _selection(manager, listening, future)]
    if not own_code(manager, MagenticOneOrchestrator):
        return [lambda future: _ledger(manager, listening, future)]
    raise NotForecastable(f"{type(manager).__name__} is not a stock manager")


def summary_dry_run(
    agent: SocietyOfMindAgent, said: Sequence[BaseChatMessage], included: bool = False
) -> DryRun:
    """Return a dry run of the call that reads what the agent's team has said by then.

    Args:
        included: as of :func:`agent_dry_runs`.

    Raises: NotForecastable.
    """
    listening = _listening(agent, included)
    if not included:
        require_stock(agent, SocietyOfMindAgent)
        for message in said:
            require_stock_message(message)

    async def run(future: Sequence[BaseChatMessage]) -> ModelCall:
        shadow: Any = copy.copy(agent)
        shadow._model_client = listening
        # What it was given before is read for its team alone.
        shadow._model_context = UnboundedChatCompletionContext()
        shadow._team = _Spoken([*said, *future])
        return await _captured(shadow, [])

    return run


def _listening(caller: Any, included: bool) -> _ListeningClient:
    client = client_of(caller)
    if client is None:
        raise NotForecastable("it has no FlashMoAChatCompletionClient")
    if not included:
        require_stock(client, FlashMoAChatCompletionClient)
    return _ListeningClient(client)


def _require_stock_agent(agent: Any) -> None:
    """Check an agent and what it holds.

    Raises: NotForecastable where a dry run would run code that is not AutoGen's own.
    """
    if not isinstance(agent, AGENTS):
        raise NotForecastable(f"it is no stock AssistantAgent but a {type(agent).__name__}")
    require_stock(agent, *AGENTS)
    if isinstance(agent, MessageFilterAgent):
        _require_stock_agent(agent._wrapped_agent)
    elif isinstance(agent, AssistantAgent):
        for workbench in agent._workbench:
            if not isinstance(workbench, StaticWorkbench):
                raise NotForecastable("its workbench would have to be asked for its tools")
            require_stock(workbench, StaticWorkbench)
            for tool in workbench._tools:
                require_stock(tool, BaseTool)
        for tool in agent._handoff_tools:
            require_stock(tool, BaseTool)


def _memories(agent: Any) -> list[Any]:
    if isinstance(agent, MessageFilterAgent):
        return _memories(agent._wrapped_agent)
    memory: Sequence[Any] | None = getattr(agent, "_memory", None)
    if not memory:
        return [None]
    # A list only lists; asking others may cost or change something.
    if not any(own_code(one, ListMemory) for one in memory):
        return [list(memory)]
    return [None, [_Found()]]


def _shadow(agent: Any, listening: _ListeningClient, memory: Any) -> Any:
    shadow: Any = copy.copy(agent)
    if isinstance(agent, MessageFilterAgent):
        shadow._wrapped_agent = _shadow(agent._wrapped_agent, listening, memory)
        return shadow
    if own_code(agent, AssistantAgent):
        return _custom_shadow(shadow, listening)
    shadow._model_client = listening
    shadow._model_context = _clone(agent._model_context)
    shadow._memory = memory
    return shadow


def _custom_shadow(shadow: Any, listening: _ListeningClient) -> Any:
    """Copy what a copy of an agent of an own class keeps itself; what that holds is shared."""
    for name, value in list(cast("dict[str, Any]", vars(shadow)).items()):
        if isinstance(value, ChatCompletionContext):
            setattr(shadow, name, _clone(value))
        elif isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))
    shadow._model_client = listening
    return shadow


def _clone(context: Any) -> Any:
    if own_code(context, *CONTEXTS):
        raise NotForecastable(
            f"its {type(context).__name__} keeps messages by rules that a text still being "
            "written can change"
        )
    clone = copy.copy(context)
    clone._messages = list(context._messages)
    return clone


async def _captured(shadow: Any, messages: Sequence[BaseChatMessage]) -> ModelCall:
    async def run() -> None:
        async for _ in shadow.on_messages_stream(messages, CancellationToken()):
            pass

    return await _first_call(run())


async def _first_call(run: Awaitable[object]) -> ModelCall:
    """Return what a run with a listening client asks first."""
    try:
        await run
    except _Captured as captured:
        return captured.call
    raise NotForecastable("it goes on without asking its model")


async def _selection(
    manager: Any, listening: _ListeningClient, future: Sequence[BaseChatMessage]
) -> ModelCall:
    shadow: Any = copy.copy(manager)
    shadow._model_client = listening
    shadow._model_context = _clone(manager._model_context)
    shadow._message_thread = list(manager._message_thread)
    await shadow.update_message_thread(future)
    return await _first_call(shadow.select_speaker(shadow._message_thread))


async def _ledger(
    manager: Any, listening: _ListeningClient, future: Sequence[BaseChatMessage]
) -> ModelCall:
    shadow: Any = copy.copy(manager)
    shadow._model_client = listening
    shadow._message_thread = [*manager._message_thread, *future]
    # What it would say of itself goes nowhere.
    shadow._output_message_queue = asyncio.Queue()
    return await _first_call(shadow._orchestrate_step(CancellationToken()))
