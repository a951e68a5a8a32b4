"""Check that a dry run would call only AutoGen's own code: linking runs no other code unasked."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any, cast

from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.messages import (
    BaseChatMessage,
    HandoffMessage,
    MultiModalMessage,
    StopMessage,
    StructuredMessage,
    TextMessage,
    ToolCallSummaryMessage,
)
from autogen_agentchat.teams._group_chat._graph._digraph_group_chat import GraphFlowManager
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import (
    MagenticOneOrchestrator,
)
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_agentchat.teams._group_chat._swarm_group_chat import SwarmGroupChatManager
from autogen_core.memory import ListMemory
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
    UnboundedChatCompletionContext,
)
from autogen_core.tools import BaseTool, StaticWorkbench
from pydantic import BaseModel

from flashmoa.autogen._classifier import ClassifierAgent
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.linking.placeholders import NotForecastable

AGENTS = (AssistantAgent, MessageFilterAgent, SocietyOfMindAgent, ClassifierAgent)
CONTEXTS = (
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
    StructuredMessage,
)
_MANAGERS = (
    RoundRobinGroupChatManager,
    GraphFlowManager,
    SelectorGroupChatManager,
    SwarmGroupChatManager,
)
# For each class, the methods that dry runs and the rules of ``_turn_order`` rely on. What these
# methods call in turn is read from their code.
_ENTRY_POINTS: dict[type, tuple[str, ...]] = {
    **dict.fromkeys(AGENTS, ("on_messages_stream",)),
    **dict.fromkeys(CONTEXTS, ("get_messages", "add_message")),
    **dict.fromkeys(_MESSAGES, ("to_model_message", "to_model_text")),
    **dict.fromkeys(_MANAGERS, ("select_speaker", "update_message_thread")),
    MagenticOneOrchestrator: ("handle_agent_response",),
    ListMemory: ("update_context",),
    StaticWorkbench: ("list_tools",),
    BaseTool: ("schema", "name"),
    BaseModel: ("model_dump", "model_dump_json"),
    FlashMoAChatCompletionClient: ("_process_create_args",),
}


def foreign_code(one: object, *kinds: type) -> str | None:
    """Return the first thing a dry run would call on ``one`` that is not AutoGen's own code.

    That is any attribute which a subclass, or the object itself, has in place of one that AutoGen's
    class uses. Attributes that a subclass only adds do not matter.

    Args:
        kinds: AutoGen's classes of which ``one`` may be an instance.

    Returns: for example ``"Mine.list_tools"``; the name of its class if it is an instance of none
        of ``kinds``; ``None`` if all of it is stock.
    """
    kind = next((owner for owner in type(one).__mro__ if owner in kinds), None)
    if kind is None:
        return type(one).__name__
    used = _used_names(kind)
    for owner in type(one).__mro__:
        if owner not in kind.__mro__ and (replaced := used & vars(owner).keys()):
            return f"{owner.__name__}.{min(replaced)}"
    replaced = used & getattr(one, "__dict__", {}).keys()
    return f"{min(replaced)} of one {type(one).__name__}" if replaced else None


def is_stock(one: object, *kinds: type) -> bool:
    """Return whether all that a dry run would call on ``one`` is AutoGen's own code."""
    return foreign_code(one, *kinds) is None


def require_stock(one: object, *kinds: type) -> None:
    """Check an object.

    Raises: NotForecastable if a dry run would run code of it that is not AutoGen's own.
    """
    if code := foreign_code(one, *kinds):
        raise NotForecastable(f"predicting its prompt would run {code}, which is not AutoGen's own")


def require_stock_message(message: BaseChatMessage) -> None:
    """Check a message and its content. Raises: NotForecastable, see :func:`require_stock`."""
    require_stock(message, *_MESSAGES)
    if isinstance(message, StructuredMessage):
        content: BaseModel = cast("Any", message).content
        require_stock(content, BaseModel)
        code = type(content).__pydantic_decorators__
        if code.field_serializers or code.model_serializers or code.computed_fields:
            raise NotForecastable(
                f"predicting its prompt would run serializers of {type(content).__name__}, "
                "which are not AutoGen's own"
            )


def client_of(agent: Any) -> FlashMoAChatCompletionClient | None:
    """Return the FlashMoA client that an agent itself calls, if it has one."""
    if isinstance(agent, MessageFilterAgent):
        return client_of(agent._wrapped_agent)
    client = getattr(agent, "_model_client", None)
    return client if isinstance(client, FlashMoAChatCompletionClient) else None


def require_no_team(agent: Any) -> None:
    """Raise NotForecastable if an agent has a team, which running a copy of it would run, too."""
    while isinstance(agent, MessageFilterAgent):
        agent = agent._wrapped_agent
    if isinstance(agent, SocietyOfMindAgent):
        raise NotForecastable("it has a team of its own, which is not linked")


def why_rewritten(agent: Any, included: bool) -> str | None:
    """Return why the message that others get may differ from its model's text, if it may.

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


@cache
def _used_names(kind: type) -> frozenset[str]:
    """Return the names of a class's attributes that its entry points use, however indirectly.

    A name used on any other object counts, too: rather too many names than too few.
    """
    names: set[str] = set()
    waiting = set(_ENTRY_POINTS[kind])
    while waiting:
        name = waiting.pop()
        names.add(name)
        used = {other for code in _code_of(kind, name) for other in code.co_names}
        waiting |= {other for other in used - names if _is_attribute(kind, other)}
    return frozenset(names)


def _is_attribute(kind: type, name: str) -> bool:
    return not name.startswith("__") and any(
        name in vars(owner) for owner in kind.__mro__ if owner is not object
    )


def _code_of(kind: type, name: str) -> Iterator[CodeType]:
    """Yield the code of a class's attribute, and what ``super()`` reaches from there."""
    for owner in kind.__mro__:
        value: Any = vars(owner).get(name)
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(function := inspect.unwrap(value) if callable(value) else None):
            codes = list(_nested_code(function.__code__))
            yield from codes
            if not any("super" in code.co_names for code in codes):
                return


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)
