"""User-defined classes that override methods which a dry run of a prompt would call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    MessageFilterAgent,
    SocietyOfMindAgent,
)
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig, PerSourceFilter
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryContent, UpdateContextResult
from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import LLMMessage, UserMessage
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolSchema

from tests.integration.autogen.teams import Client, agent

# Is called in each run of a method, and returns the number of that run.
Counted = Callable[[], int]
Build = Callable[[Client, Counted], BaseGroupChat]


async def _look(place: str) -> str:
    """Look at a place."""
    return f"a fine {place}"


def _tool() -> FunctionTool:
    return FunctionTool(_look, description="Looks.", name="look")


def _three(client: Client, second: BaseChatAgent, turns: int = 6) -> BaseGroupChat:
    """Make a team in which the second agent is linked to the first, and the third to it, twice."""
    members = [agent(client, "one"), second, agent(client, "three")]
    return RoundRobinGroupChat(members, max_turns=turns)


def workbench(client: Client, counted: Counted) -> BaseGroupChat:
    """Make a team with a workbench whose tools' text depends on the number of its calls."""

    class Stateful(StaticWorkbench):
        async def list_tools(self) -> list[ToolSchema]:
            (tool,) = await super().list_tools()
            return [{**tool, "description": f"Looks, asked {counted()} times."}]

    return _three(client, agent(client, "two", workbench=Stateful([_tool()])))


def workbench_of_one(client: Client, counted: Counted) -> BaseGroupChat:
    """Make a team with a stock workbench on which one method was replaced."""
    one: Any = StaticWorkbench([_tool()])
    stock = one.list_tools

    async def list_tools() -> list[ToolSchema]:
        counted()
        return await stock()

    one.list_tools = list_tools
    return _three(client, agent(client, "two", workbench=one))


def tool(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(FunctionTool):
        @property
        def schema(self) -> ToolSchema:
            return {**super().schema, "description": f"Looks, asked {counted()} times."}

    own = Own(_look, description="Looks.", name="look")
    return _three(client, agent(client, "two", tools=[own]))


def stream(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(AssistantAgent):
        async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
            counted()
            async for item in super().on_messages_stream(messages, cancellation_token):
                yield item

    return _three(client, Own("two", model_client=client))


def stream_of_one(client: Client, counted: Counted) -> BaseGroupChat:
    two: Any = agent(client, "two")
    stock = two.on_messages_stream

    async def on_messages_stream(messages: Any, token: CancellationToken) -> AsyncGenerator[Any]:
        counted()
        async for item in stock(messages, token):
            yield item

    two.on_messages_stream = on_messages_stream
    return _three(client, two)


def adding(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(AssistantAgent):
        @staticmethod
        async def _add_messages_to_context(
            model_context: ChatCompletionContext, messages: Sequence[BaseChatMessage]
        ) -> None:
            said = f"This is turn {counted()}."
            await model_context.add_message(UserMessage(content=said, source="clock"))
            await AssistantAgent._add_messages_to_context(model_context, messages)

    return _three(client, Own("two", model_client=client))


def calling(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(AssistantAgent):
        @classmethod
        async def _call_llm(cls, **rest: Any) -> Any:  # type: ignore[override]
            counted()
            async for item in super()._call_llm(**rest):
                yield item

    return _three(client, Own("two", model_client=client))


def filtering(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(MessageFilterAgent):
        async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
            more = TextMessage(content=f"This is turn {counted()}.", source="user")
            async for item in super().on_messages_stream([more, *messages], cancellation_token):
                yield item

    wanted = [PerSourceFilter(source=name) for name in ("user", "one", "three")]
    config = MessageFilterConfig(per_source=wanted)
    return _three(client, Own("two", agent(client, "two"), config))


def society(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(SocietyOfMindAgent):
        async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
            self._response_prompt = f"Answer. This is turn {counted()}."
            async for item in super().on_messages_stream(messages, cancellation_token):
                yield item

    inner = RoundRobinGroupChat([agent(client, n) for n in ("in1", "in2")], max_turns=2)
    return _three(client, Own("two", team=inner, model_client=client))


def context(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(UnboundedChatCompletionContext):
        async def get_messages(self) -> list[LLMMessage]:
            counted()
            return await super().get_messages()

    return _three(client, agent(client, "two", model_context=Own()))


def memory(client: Client, counted: Counted) -> BaseGroupChat:
    class Own(ListMemory):
        async def update_context(self, model_context: ChatCompletionContext) -> UpdateContextResult:
            counted()
            return await super().update_context(model_context)

    kept = Own(memory_contents=[MemoryContent(content="It rains.", mime_type="text/plain")])
    return _three(client, agent(client, "two", memory=[kept], system_message=None), turns=3)


class Numbered(TextMessage):
    """A message whose text has the number of times that it was asked for."""

    type: Any = "Numbered"
    counted: Any = None

    def to_model_message(self) -> UserMessage:
        said = f"{self.content} ({self.counted()})"
        return UserMessage(content=said, source=self.source)


class Saying(BaseChatAgent):
    """An agent that calls no model."""

    def __init__(self, name: str, counted: Counted) -> None:
        super().__init__(name, "Says the same.")
        self._counted = counted

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (Numbered,)

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        said = Numbered(content="I see.", source=self.name, counted=self._counted)
        return Response(chat_message=said)

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


def message(client: Client, counted: Counted) -> BaseGroupChat:
    """Make a team with a message that would differ if a link to its reader asked for its text."""
    speaking = [agent(client, name) for name in ("one", "three", "four")]
    members = [speaking[0], Saying("two", counted), *speaking[1:]]
    return RoundRobinGroupChat(members, max_turns=8, custom_message_types=[Numbered])


def manager(client: Client, counted: Counted) -> BaseGroupChat:
    class Manager(SelectorGroupChatManager):
        def construct_message_history(self, message_history: list[LLMMessage]) -> str:
            return f"{super().construct_message_history(message_history)} ({counted()})"

    class Own(SelectorGroupChat):
        def _create_group_chat_manager_factory(self, **given: Any) -> Any:
            make: Any = super()._create_group_chat_manager_factory(**given)

            def own() -> SelectorGroupChatManager:
                made = make()
                made.__class__ = Manager
                return made

            return own

    members = [agent(client, name) for name in ("one", "two", "three")]
    return Own(members, model_client=client, max_turns=4, max_selector_attempts=1)


class Converting(Client):
    """A client whose requests depend on how many have been made."""

    counted: Counted

    def _process_create_args(self, *given: Any, **named: Any) -> Any:
        params = super()._process_create_args(*given, **named)
        params.messages[0]["content"] += f" This is request {self.counted()}."  # type: ignore[index,operator]
        return params


def client(plain: Client, counted: Counted) -> BaseGroupChat:
    own = Converting.__new__(Converting)
    vars(own).update(vars(plain), counted=counted)
    return _three(plain, agent(own, "two"))
