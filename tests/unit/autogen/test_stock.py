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
from autogen_core.models import ModelFamily, ModelInfo
from autogen_core.tools import BaseTool, FunctionTool, StaticStreamWorkbench, StaticWorkbench
from pydantic import BaseModel, field_serializer

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.autogen._dry_run import agent_dry_runs
from flashmoa.autogen._stock import (
    WORKBENCHES,
    is_stock,
    require_stock,
    require_stock_message,
    require_stock_methods,
)
from flashmoa.linking.placeholders import NotForecastable

INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family=ModelFamily.UNKNOWN,
    structured_output=False,
)  # fmt: skip


def tool(name: str = "look") -> FunctionTool:
    return FunctionTool(lambda: "", description="Looks.", name=name)


def test_a_member_that_a_team_lacks_is_not_stock() -> None:
    assert not is_stock(None, AssistantAgent)


def test_an_object_is_stock_until_a_method_is_set_on_it() -> None:
    for bench in (StaticWorkbench([tool()]), StaticStreamWorkbench([tool()])):
        require_stock(bench, *WORKBENCHES)
        bench.list_tools = list  # type: ignore[assignment]
        with pytest.raises(NotForecastable, match="or was changed"):
            require_stock(bench, *WORKBENCHES)


def test_a_tool_of_ones_own_is_stock_unless_it_changes_what_prompts_show() -> None:
    class Counting(FunctionTool):
        async def run(self, *args: Any, **kwargs: Any) -> Any: ...

    class Renamed(FunctionTool):
        @property
        def description(self) -> str:
            return "Looks again."

    require_stock_methods(Counting(lambda: "", description=""), BaseTool)
    with pytest.raises(NotForecastable, match=r"Renamed\.description"):
        require_stock_methods(Renamed(lambda: "", description=""), BaseTool)


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
