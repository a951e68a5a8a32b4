"""Checks that what a dry run calls is AutoGen's own code: linking runs no other code unasked."""

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
# What dry runs, and the rules of who speaks next, count on of each class; what that calls in
# turn is read from its code.
_CALLED: dict[type, tuple[str, ...]] = {
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


def own_code(one: object, *kinds: type) -> str | None:
    """Return what of an object is not AutoGen's own, among what a dry run would call.

    That is anything that a subclass, or the object itself, has in place of what one of AutoGen's
    classes calls; what a subclass adds besides does not matter.

    Args:
        kinds: what it may be, and is checked as.

    Returns: ``"Mine.list_tools"``, say; its class where that is none of these kinds; ``None``
        where all is AutoGen's own.
    """
    kind = next((owner for owner in type(one).__mro__ if owner in kinds), None)
    if kind is None:
        return type(one).__name__
    reached = _reached(kind)
    for owner in type(one).__mro__:
        if owner not in kind.__mro__ and (own := reached & vars(owner).keys()):
            return f"{owner.__name__}.{min(own)}"
    own = reached & getattr(one, "__dict__", {}).keys()
    return f"{min(own)} of one {type(one).__name__}" if own else None


def require_stock(one: object, *kinds: type) -> None:
    """Check an object. Raises: NotForecastable where a dry run would run code not AutoGen's own."""
    if own := own_code(one, *kinds):
        raise NotForecastable(f"telling its prompt would run {own}, which is not AutoGen's own")


def require_stock_message(message: BaseChatMessage) -> None:
    """Check a message and its content. Raises: NotForecastable, as :func:`require_stock`."""
    require_stock(message, *_MESSAGES)
    if isinstance(message, StructuredMessage):
        content: BaseModel = cast("Any", message).content
        require_stock(content, BaseModel)
        own = type(content).__pydantic_decorators__
        if own.field_serializers or own.model_serializers or own.computed_fields:
            raise NotForecastable(
                f"telling its prompt would run serializers of {type(content).__name__}, "
                "which are not AutoGen's own"
            )


def client_of(agent: Any) -> FlashMoAChatCompletionClient | None:
    """Return the FlashMoA client that an agent calls itself, if it has one."""
    if isinstance(agent, MessageFilterAgent):
        return client_of(agent._wrapped_agent)
    client = getattr(agent, "_model_client", None)
    return client if isinstance(client, FlashMoAChatCompletionClient) else None


def rewrites(agent: Any, included: bool) -> str | None:
    """Return why the message others get is not the text its model answers with, if so.

    Args:
        included: whether the user vouches for an agent that is no stock one.
    """
    if included:
        return None
    if not own_code(agent, MessageFilterAgent):
        return rewrites(agent._wrapped_agent, included)
    if own_code(agent, AssistantAgent, SocietyOfMindAgent):
        return f"a {type(agent).__name__} may send others something else than its model's text"
    structured = getattr(agent, "_output_content_type", None) is not None
    return "its answer is structured" if structured else None


@cache
def _reached(kind: type) -> frozenset[str]:
    """Return names of a class's attributes that what is called of it uses, however indirectly;
    rather too many than too few."""
    found: set[str] = set()
    waiting = set(_CALLED[kind])
    while waiting:
        name = waiting.pop()
        found.add(name)
        used = {one for code in _codes(kind, name) for one in code.co_names}
        waiting |= {one for one in used - found if _is_attribute(kind, one)}
    return frozenset(found)


def _is_attribute(kind: type, name: str) -> bool:
    return not name.startswith("__") and any(
        name in vars(owner) for owner in kind.__mro__ if owner is not object
    )


def _codes(kind: type, name: str) -> Iterator[CodeType]:
    """Yield the code behind a name of a class, and what ``super()`` reaches from there."""
    for owner in kind.__mro__:
        value: Any = vars(owner).get(name)
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(function := inspect.unwrap(value) if callable(value) else None):
            codes = list(_within(function.__code__))
            yield from codes
            if not any("super" in code.co_names for code in codes):
                return


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
