"""Whether a dry run would call code of a user's objects that is not AutoGen's own."""

from __future__ import annotations

from typing import Any

import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    SocietyOfMindAgent,
)
from autogen_agentchat.messages import BaseChatMessage, StructuredMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.model_context import (
    TokenLimitedChatCompletionContext,
    UnboundedChatCompletionContext,
)
from autogen_core.models import ModelFamily, ModelInfo
from autogen_core.tools import FunctionTool, StaticStreamWorkbench, StaticWorkbench
from pydantic import BaseModel, field_serializer

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.autogen._dry_run import agent_dry_runs
from flashmoa.autogen._stock import CONTEXTS, foreign_code, is_stock, require_stock_message
from flashmoa.linking.placeholders import NotForecastable

INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family=ModelFamily.UNKNOWN,
    structured_output=False,
)  # fmt: skip


def tool(name: str = "look") -> FunctionTool:
    return FunctionTool(lambda: "", description="Looks.", name=name)


def test_a_subclass_that_changes_no_called_method_is_stock() -> None:
    class Mine(StaticWorkbench):
        async def call_tool(self, *args: Any, **kwargs: Any) -> Any:
            return await super().call_tool(*args, **kwargs)

        def describe(self) -> str:
            return "mine"

    assert is_stock(Mine([tool()]), StaticWorkbench)
    assert is_stock(StaticStreamWorkbench([tool()]), StaticWorkbench)


def test_an_overridden_method_that_is_called_indirectly_is_own_code() -> None:
    class Mine(AssistantAgent):
        @staticmethod
        def _get_compatible_context(*args: Any, **kwargs: Any) -> Any: ...

        async def on_reset(self, cancellation_token: Any) -> None: ...

    mine = Mine.__new__(Mine)
    assert foreign_code(mine, AssistantAgent) == "Mine._get_compatible_context"


def test_a_method_of_a_mixin_is_own_code() -> None:
    class Mixin:
        async def get_messages(self) -> list[Any]:
            return []

    class Mine(Mixin, UnboundedChatCompletionContext): ...  # type: ignore[misc]

    assert foreign_code(Mine(), *CONTEXTS) == "Mixin.get_messages"


def test_a_method_set_on_one_object_is_own_code() -> None:
    bench: Any = StaticWorkbench([tool()])
    bench.list_tools = list
    assert foreign_code(bench, StaticWorkbench) == "list_tools of one StaticWorkbench"


def test_a_class_that_is_not_stock_is_named() -> None:
    context = TokenLimitedChatCompletionContext.__new__(TokenLimitedChatCompletionContext)
    assert foreign_code(context, *CONTEXTS) == "TokenLimitedChatCompletionContext"


class Plain(BaseModel):
    city: str


class WithSerializer(BaseModel):
    city: str

    @field_serializer("city")
    def serialize_city(self, city: str) -> str:
        return city.upper()


def test_structured_messages_are_stock_unless_their_content_has_serializers() -> None:
    message: BaseChatMessage = StructuredMessage[Plain](content=Plain(city="Pokhara"), source="a")
    require_stock_message(message)
    require_stock_message(TextMessage(content="Go.", source="a"))
    other = StructuredMessage[WithSerializer](content=WithSerializer(city="Pokhara"), source="a")
    with pytest.raises(NotForecastable, match="serializers of WithSerializer"):
        require_stock_message(other)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_no_copy_of_an_agent_with_a_team_is_run(is_filtered: bool) -> None:
    """The copy would have the real team, whose agents would be asked."""
    client = FlashMoAChatCompletionClient(model="m", base_url="http://127.0.0.1:9", model_info=INFO)
    inner = RoundRobinGroupChat([AssistantAgent("inner", client)])
    agent: Any = SocietyOfMindAgent("minds", team=inner, model_client=client)
    if is_filtered:
        agent = MessageFilterAgent("minds", agent, MessageFilterConfig(per_source=[]))
    with pytest.raises(NotForecastable, match="has a team of its own"):
        agent_dry_runs(agent, [], included=True)
