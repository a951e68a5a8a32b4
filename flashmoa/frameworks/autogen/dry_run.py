"""Dry runs: find the next model call of an agent or manager by running AutoGen's code on a copy.

The copy is shallow, with a cloned model context and a client that stops the run at its first call.
It gets the agent's messages, and placeholders for messages that are still being written, so that it
builds its prompt as the agent will. The team does not change. Unless the user includes the agent, a
dry run only runs AutoGen's own code.

Some things are unknown beforehand: which parallel agent finishes first, what a memory finds. Then
each possibility gets a dry run, and only the common beginning of their prompts is used.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import (
    BaseChatMessage,
    HandoffMessage,
    MultiModalMessage,
    StopMessage,
    StructuredMessage,
    TextMessage,
    ToolCallSummaryMessage,
)
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import (
    MagenticOneOrchestrator,
)
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryQueryResult, UpdateContextResult
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    ChatCompletionContext,
    HeadAndTailChatCompletionContext,
    UnboundedChatCompletionContext,
)
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
)
from autogen_core.tools import BaseTool, StaticStreamWorkbench, StaticWorkbench
from pydantic import BaseModel

from flashmoa.frameworks.autogen.calls import ToolAnswer
from flashmoa.frameworks.autogen.client import FlashMoAChatCompletionClient
from flashmoa.link.after_tools import RequestAfterTools, name_calls
from flashmoa.link.expected import ChatRequest, RequestCaptured, first_request
from flashmoa.link.prompt import NotForecastable
from flashmoa.scoring import Scores

_AGENTS = (AssistantAgent, MessageFilterAgent, SocietyOfMindAgent)
_CONTEXTS = (
    UnboundedChatCompletionContext,
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
)
_MESSAGES = (
    TextMessage,
    MultiModalMessage,
    StopMessage,
    HandoffMessage,
    ToolCallSummaryMessage,
)
# Tools, clients and contents of messages usually have user-defined classes. Dry runs call only
# these methods, which must be AutoGen's own.
_CALLED: dict[type, tuple[str, ...]] = {
    BaseTool: ("schema", "name", "description", "args_type"),
    BaseModel: ("model_dump", "model_dump_json"),
    FlashMoAChatCompletionClient: ("_process_create_args", "model_info"),
}
_INCLUDE = "if that does no harm, name the agent in include"


# Takes the messages that an agent receives until its turn, and returns its request in this turn.
# Raises NotForecastable if it would make no request, or if its model context cannot be copied.
DryRun = Callable[[Sequence[BaseChatMessage]], Awaitable[ChatRequest]]


class CapturingClient:
    """Stands in for a model client; raises the first request as :class:`RequestCaptured`."""

    def __init__(self, real: FlashMoAChatCompletionClient) -> None:
        self.model_info = real.model_info
        self._real = real

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Any] = (),
        tool_choice: Any = "auto",
        extra_create_args: Mapping[str, Any] = {},
        **_: Any,
    ) -> CreateResult:
        raise RequestCaptured(self._real._request(messages, tools, tool_choice, extra_create_args))

    async def create_stream(
        self, messages: Sequence[LLMMessage], **options: Any
    ) -> AsyncGenerator[CreateResult]:
        yield await self.create(messages, **options)

    async def score(self, messages: Sequence[LLMMessage], *_: Any, **__: Any) -> Scores:
        raise RequestCaptured(self._real._scoring_request(messages))


class _UnknownMemory:
    """Replaces a memory that may find something."""

    async def update_context(self, model_context: ChatCompletionContext) -> UpdateContextResult:
        await model_context.add_message(SystemMessage(content="?"))
        return UpdateContextResult(memories=MemoryQueryResult(results=[]))


class _FinishedTeam:
    """Replaces a team: its run returns the given messages."""

    def __init__(self, messages: Sequence[BaseChatMessage]) -> None:
        self._messages = messages

    async def run_stream(self, **_: Any) -> AsyncGenerator[BaseChatMessage | TaskResult]:
        for message in self._messages:
            yield message
        yield TaskResult(messages=self._messages)


def is_stock(one: object, *kinds: type) -> bool:
    """Return whether an object has exactly a class in ``kinds``, and no replaced methods."""
    kind = type(one)
    return kind in kinds and not any(callable(getattr(kind, name, None)) for name in vars(one))


def require_stock(one: object, *kinds: type) -> None:
    """Raise NotForecastable if a dry run might run code of an object that is not AutoGen's."""
    if not is_stock(one, *kinds):
        raise NotForecastable(
            f"predicting its prompt would run code of its {type(one).__name__}, which is not "
            f"AutoGen's own or was changed; {_INCLUDE}"
        )


def require_stock_methods(one: object, kind: type) -> None:
    """Raise NotForecastable if a dry run would run a method that is not AutoGen's ``kind``'s."""
    for name in _CALLED[kind]:
        if getattr(type(one), name, None) is not getattr(kind, name) or name in vars(one):
            raise NotForecastable(
                f"predicting its prompt would run {type(one).__name__}.{name}, which is not "
                f"AutoGen's own; {_INCLUDE}"
            )


def require_stock_message(message: BaseChatMessage) -> None:
    """Check a message and its content, as :func:`require_stock` does."""
    if type(message).__pydantic_generic_metadata__["origin"] is not StructuredMessage:
        require_stock(message, *_MESSAGES)
        return
    content: BaseModel = cast("Any", message).content
    require_stock_methods(content, BaseModel)
    code = type(content).__pydantic_decorators__
    if code.field_serializers or code.model_serializers or code.computed_fields:
        raise NotForecastable(
            f"predicting its prompt would run serializers of {type(content).__name__}, "
            "which are not AutoGen's own"
        )


def _require_stock_agent(agent: Any) -> None:
    """Check an agent, its workbenches and its tools, as :func:`require_stock` does."""
    if type(agent) not in _AGENTS:
        raise NotForecastable(f"it is a {type(agent).__name__}, not a stock AssistantAgent")
    require_stock(agent, *_AGENTS)
    if isinstance(agent, MessageFilterAgent):
        _require_stock_agent(agent._wrapped_agent)
    elif isinstance(agent, AssistantAgent):
        tools = list(agent._handoff_tools)
        for workbench in agent._workbench:
            if not isinstance(workbench, StaticWorkbench):
                raise NotForecastable(
                    "predicting its prompt would ask its workbench for tools, which may have "
                    "effects"
                )
            require_stock(workbench, StaticWorkbench, StaticStreamWorkbench)
            tools += workbench._tools
        for tool in tools:
            require_stock_methods(tool, BaseTool)


def unwrapped(agent: Any) -> Any:
    """Return the agent inside message filters, or the agent itself."""
    while isinstance(agent, MessageFilterAgent):
        agent = agent._wrapped_agent
    return agent


def client_of(agent: Any) -> FlashMoAChatCompletionClient | None:
    """Return the FlashMoA client that an agent itself calls, if it has one."""
    client = getattr(unwrapped(agent), "_model_client", None)
    return client if isinstance(client, FlashMoAChatCompletionClient) else None


def why_rewritten(agent: Any, included: bool) -> str | None:
    """Return why others may get a message other than its model's text, or ``None``.

    Args:
        included: whether the user listed the agent in ``include``, and so promised that the
            message is the model's text.
    """
    if included:
        return None
    if is_stock(agent, MessageFilterAgent):
        return why_rewritten(agent._wrapped_agent, included)
    if not is_stock(agent, AssistantAgent, SocietyOfMindAgent):
        return f"a {type(agent).__name__} may send others something other than its model's text"
    structured = getattr(agent, "_output_content_type", None) is not None
    return "its answer is structured" if structured else None


def agent_dry_runs(
    agent: Any, received: Sequence[BaseChatMessage], included: bool = False
) -> list[DryRun]:
    """Return dry runs of an agent's next turn; two if its memory may find something.

    Args:
        received: messages it has received since its last turn.
        included: whether the user listed the agent in ``include``, and so allows its user-defined
            code to be run.

    Raises: NotForecastable if the agent has no FlashMoA client or has a team, or if it is not
        included and a dry run would run code that is not AutoGen's.
    """
    client = make_capturing_client(agent, included)
    if isinstance(unwrapped(agent), SocietyOfMindAgent):
        # A copy of the agent would run the same team.
        raise NotForecastable("it has a team of its own, which is not linked")
    if not included:
        _require_stock_agent(agent)
        for message in received:
            require_stock_message(message)

    def make_dry_run(memory: Any) -> DryRun:
        async def run(future: Sequence[BaseChatMessage]) -> ChatRequest:
            shadow = _make_shadow(agent, client, memory)
            return await _call_of_turn(shadow, [*received, *future])

        return run

    return [make_dry_run(memory) for memory in _memory_alternatives(agent)]


def manager_dry_run(manager: Any) -> DryRun:
    """Return a dry run of a manager's own next call.

    In this call a selector chooses the next speaker, or MagenticOne's orchestrator updates its
    ledger.

    Raises: NotForecastable if the manager has no FlashMoA client, or is not AutoGen's.
    """
    client = make_capturing_client(manager, included=False)
    if not is_stock(manager, SelectorGroupChatManager, MagenticOneOrchestrator):
        raise NotForecastable(f"{type(manager).__name__} is not a stock manager")

    async def run(future: Sequence[BaseChatMessage]) -> ChatRequest:
        shadow: Any = copy.copy(manager)
        shadow._model_client = client
        if isinstance(manager, MagenticOneOrchestrator):
            shadow._message_thread = [*manager._message_thread, *future]
            # Messages that the copy publishes must not reach the team's output.
            shadow._output_message_queue = asyncio.Queue()
            return await first_request(shadow._orchestrate_step(CancellationToken()))
        shadow._model_context = clone_context(manager._model_context)
        shadow._message_thread = list(manager._message_thread)
        await shadow.update_message_thread(future)
        return await first_request(shadow.select_speaker(shadow._message_thread))

    return run


def summary_dry_run(
    agent: SocietyOfMindAgent, said: Sequence[BaseChatMessage], included: bool = False
) -> DryRun:
    """Return a dry run of an agent's call that sums up the run of its inner team.

    Args:
        said: messages of the inner team's run so far.
        included: see :func:`agent_dry_runs`, also for exceptions.
    """
    client = make_capturing_client(agent, included)
    if not included:
        require_stock(agent, SocietyOfMindAgent)
        for message in said:
            require_stock_message(message)

    async def run(future: Sequence[BaseChatMessage]) -> ChatRequest:
        shadow = _copy_with_containers(agent)
        shadow._model_client = client
        # Earlier messages go to the inner team only, never into the prompt of the summary.
        shadow._model_context = UnboundedChatCompletionContext()
        shadow._team = _FinishedTeam([*said, *future])
        return await _call_of_turn(shadow, [])

    return run


def make_capturing_client(caller: Any, included: bool) -> CapturingClient:
    client = client_of(caller)
    if client is None:
        raise NotForecastable("it has no FlashMoAChatCompletionClient")
    if not included:
        require_stock_methods(client, FlashMoAChatCompletionClient)
    return CapturingClient(client)


def _memory_alternatives(agent: Any) -> list[Any]:
    """Return the values of ``_memory`` for dry runs of an agent."""
    memories: Sequence[Any] | None = getattr(unwrapped(agent), "_memory", None)
    if not memories:
        return [None]
    # Querying a ListMemory is free and changes nothing. Other memories are not queried: one dry run
    # has no find, another an unknown find.
    if all(is_stock(memory, ListMemory) for memory in memories):
        return [list(memories)]
    return [None, [_UnknownMemory()]]


def _make_shadow(agent: Any, client: CapturingClient, memory: Any) -> Any:
    """Return a copy of an agent whose turn does not change the agent."""
    shadow = _copy_with_containers(agent)
    if isinstance(agent, MessageFilterAgent):
        shadow._wrapped_agent = _make_shadow(agent._wrapped_agent, client, memory)
        return shadow
    shadow._model_client = client
    for name, value in list(cast("dict[str, Any]", vars(shadow)).items()):
        if isinstance(value, ChatCompletionContext):
            setattr(shadow, name, clone_context(value))
    if is_stock(agent, AssistantAgent):
        shadow._memory = memory
    return shadow


def _copy_with_containers(agent: Any) -> Any:
    """Copy an agent, and its containers: the attributes of user-defined classes are unknown."""
    shadow = copy.copy(agent)
    for name, value in list(cast("dict[str, Any]", vars(shadow)).items()):
        if isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))
    return shadow


def clone_context(context: Any) -> Any:
    if not is_stock(context, *_CONTEXTS):
        raise NotForecastable(
            f"its {type(context).__name__} chooses messages by rules that a text still being "
            "written can change"
        )
    clone = copy.copy(context)
    clone._messages = list(context._messages)
    return clone


async def _call_of_turn(shadow: Any, messages: Sequence[BaseChatMessage]) -> ChatRequest:
    return await first_request(_drain(shadow.on_messages_stream(messages, CancellationToken())))


def own_request(
    name: str, agent: AssistantAgent, answer: ToolAnswer, included: bool
) -> RequestAfterTools | None:
    """Return the request that an agent makes after the tools of its answer, if it makes one.

    This reads the agent's context: call it while the agent still waits for the answer.

    Args:
        name: the agent's name in its team.
        included: see :func:`agent_dry_runs`, also for exceptions.
    """
    subject: Any = agent
    calls = answer.called.calls
    tools = name_calls([call.name for call in calls])
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

    async def request(results: Mapping[str, str]) -> ChatRequest:
        history, thought = clone_context(context), answer.result.thought
        executed = [
            FunctionExecutionResult(
                content=results[tool], call_id=call.id, is_error=False, name=call.name
            )
            for call, tool in zip(calls, tools, strict=True)
        ]
        await history.add_message(
            AssistantMessage(content=list(calls), source=agent.name, thought=thought)
        )
        await history.add_message(FunctionExecutionResultMessage(content=executed))
        return await first_request(_drain(ask(model_context=history)))

    return RequestAfterTools(name, tools, [request])


async def _drain(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass
