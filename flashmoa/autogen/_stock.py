"""Check that a dry run would call only AutoGen's own code: linking runs no other code unasked."""

from __future__ import annotations

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
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
    UnboundedChatCompletionContext,
)
from autogen_core.tools import BaseTool, StaticStreamWorkbench, StaticWorkbench
from pydantic import BaseModel

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.linking.placeholders import NotForecastable

AGENTS = (AssistantAgent, MessageFilterAgent, SocietyOfMindAgent)
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
)
WORKBENCHES = (StaticWorkbench, StaticStreamWorkbench)
# Tools, clients and contents of messages are of classes of users' own as a rule. Of these classes
# dry runs call only methods of these names, which must be those of AutoGen's class.
_CALLED: dict[type, tuple[str, ...]] = {
    BaseTool: ("schema", "name", "description", "args_type"),
    BaseModel: ("model_dump", "model_dump_json"),
    FlashMoAChatCompletionClient: ("_process_create_args", "model_info"),
}


def is_stock(one: object, *kinds: type) -> bool:
    """Return whether an object is of exactly one of AutoGen's classes, and has all its methods."""
    kind = type(one)
    return kind in kinds and not any(callable(getattr(kind, name, None)) for name in vars(one))


def require_stock(one: object, *kinds: type) -> None:
    """Check an object.

    Raises: NotForecastable if a dry run might run code of it that is not AutoGen's own.
    """
    if not is_stock(one, *kinds):
        raise NotForecastable(
            f"predicting its prompt would run code of its {type(one).__name__}, which is not "
            "AutoGen's own or was changed; if that does no harm, name the agent in include"
        )


def require_stock_methods(one: object, kind: type) -> None:
    """Check that a tool, a client or a message's content has the methods of AutoGen's class.

    Raises: NotForecastable if a dry run would run a method that is not AutoGen's own.
    """
    for name in _CALLED[kind]:
        if getattr(type(one), name, None) is not getattr(kind, name) or name in vars(one):
            raise NotForecastable(
                f"predicting its prompt would run {type(one).__name__}.{name}, which is not "
                "AutoGen's own; if that does no harm, name the agent in include"
            )


def require_stock_message(message: BaseChatMessage) -> None:
    """Check a message and its content. Raises: NotForecastable, see :func:`require_stock`."""
    if type(message).__pydantic_generic_metadata__["origin"] is not StructuredMessage:
        require_stock(message, *_MESSAGES)
    else:
        content: BaseModel = cast("Any", message).content
        require_stock_methods(content, BaseModel)
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
