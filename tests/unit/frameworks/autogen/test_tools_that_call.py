"""What an agent's tools ask a model is not what the agent asks; without engines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.tools import TeamTool
from autogen_core import CancellationToken
from autogen_core.models import CreateResult, RequestUsage, UserMessage
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolResult
from autogen_ext.models.openai import OpenAIChatCompletionClient

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.observe import CallStarted, Event
from tests.unit.events import of_kind
from tests.unit.frameworks.autogen.scripted_agents import called
from tests.unit.frameworks.autogen.teams import make_team, team_of

Ask = Callable[[], Awaitable[str]]
Way = Callable[[Ask], Awaitable[str]]


class Client(FlashMoAChatCompletionClient):
    async def ask(self) -> str:
        result = await self.create([UserMessage(content="Which lake?", source="user")])
        return str(result.content)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Client]:
    """A client whose requests are answered in place of AutoGen's own client, which it extends.

    An agent's first request is answered with a call of its tool, and others with a text.
    """

    async def create(_: Any, __: Any, *, tools: Any = (), **___: Any) -> CreateResult:
        await asyncio.sleep(0)
        calls = called(*((tool["name"], {"task": "Look."}) for tool in tools))
        content, usage = calls or "This one.", RequestUsage(prompt_tokens=1, completion_tokens=1)
        return CreateResult(finish_reason="stop", content=content, usage=usage, cached=False)

    monkeypatch.setattr(OpenAIChatCompletionClient, "create", create)
    client = Client(model="gpt-4o", base_url="http://127.0.0.1:9")
    yield client
    await client.close()


async def ask_directly(ask: Ask) -> str:
    return await ask()


async def ask_twice_at_once(ask: Ask) -> str:
    return "".join(await asyncio.gather(ask(), ask()))


async def ask_in_time(ask: Ask) -> str:
    # Before Python 3.12 this is a task of its own.
    return await asyncio.wait_for(ask(), 5)


async def ask_in_a_thread(ask: Ask) -> str:
    return await asyncio.to_thread(lambda: asyncio.run(ask()))  # type: ignore[arg-type]


WAYS = (ask_directly, ask_twice_at_once, ask_in_time, ask_in_a_thread)


def with_function(client: Client, way: Way, of: Any = None, **options: Any) -> AssistantAgent:
    async def look() -> str:
        return await way(client.ask)

    tools: Any = [FunctionTool(look, description="looks")]
    return AssistantAgent("one", of or client, tools=tools, reflect_on_tool_use=True, **options)


def with_workbench(client: Client, way: Way) -> AssistantAgent:
    class Bench(StaticWorkbench):
        async def call_tool(self, *_: Any, **__: Any) -> ToolResult:
            return await super().call_tool("look", {"place": await way(client.ask)})

    async def look(place: str) -> str:
        return place

    bench = Bench([FunctionTool(look, description="looks")])
    return AssistantAgent("one", client, workbench=bench, reflect_on_tool_use=True)


class Asker(AssistantAgent):
    """Has a method that is a tool."""

    way: Way

    async def look(self) -> str:
        """Look."""
        return await self.way(self._ask)

    async def _ask(self) -> str:
        client: Any = self._model_client
        return await client.ask()


async def run_linked(
    client: Client, *agents: Any, include: Sequence[str] = ()
) -> tuple[list[str], list[set[str]]]:
    """Run a linked team once around.

    Return the agents of the reported calls, and for each ``ask`` the agents with a held request.
    """
    events: list[Event] = []
    held: list[set[str]] = []
    team = team_of(*agents)
    linked = link(team, listener=events.append, include=include)

    async def ask() -> str:
        answer = await Client.ask(client)
        held.append(set(linked._planner.tools))
        return answer

    client.ask = ask  # type: ignore[method-assign]
    await team.run(task="Go.")
    await linked.close()
    return [event.agent for event in of_kind(events, CallStarted)], held


def with_method(client: Client, way: Way) -> AssistantAgent:
    agent = Asker("one", client, reflect_on_tool_use=True)
    agent.way = staticmethod(way)  # type: ignore[method-assign]
    agent._workbench = [StaticWorkbench([FunctionTool(agent.look, description="looks")])]
    return agent


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", [with_function, with_workbench, with_method])
async def test_the_calls_of_a_tool_are_not_its_agents(
    client: Client, make: Callable[[Client, Way], AssistantAgent], way: Way
) -> None:
    callers, held = await run_linked(client, make(client, way), include=["one"])
    assert callers == ["one", "one"]
    # They leave the agent's own next request alone.
    assert held and all(agents == {"one"} for agents in held)


async def test_what_a_tool_leaves_running_is_its_own(client: Client) -> None:
    left: list[asyncio.Task[str]] = []
    tool_has_ended = asyncio.Event()

    async def ask_later() -> str:
        await tool_has_ended.wait()
        return await client.ask()

    async def look() -> str:
        """Look later."""
        left.append(asyncio.create_task(ask_later()))
        return "later"

    class Patient(AssistantAgent):
        async def on_messages_stream(self, *arguments: Any) -> Any:
            async for item in super().on_messages_stream(*arguments):
                if isinstance(item, Response):
                    tool_has_ended.set()
                    await left[0]
                yield item

    agent = Patient("one", client, tools=[look], reflect_on_tool_use=True)
    assert (await run_linked(client, agent))[0] == ["one", "one"]


async def test_tools_of_other_clients_agents_call_alone(client: Client) -> None:
    other = OpenAIChatCompletionClient(model="gpt-4o", api_key="EMPTY")
    one = with_function(client, ask_directly, of=other)
    callers, held = await run_linked(client, one, AssistantAgent("two", client))
    assert callers == ["two"] and len(held) == 1


async def test_calls_in_an_agents_tasks_are_its_own(client: Client) -> None:
    class Impatient(BaseChatAgent):
        produced_message_types = (TextMessage,)

        async def on_messages(
            self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
        ) -> Response:
            texts = [await asyncio.create_task(client.ask()) for _ in range(2)]
            return Response(chat_message=TextMessage(content=texts[0], source=self.name))

        async def on_reset(self, cancellation_token: CancellationToken) -> None: ...

    agent: Any = Impatient("one", "asks")
    agent._model_client = client
    assert (await run_linked(client, agent))[0] == ["one", "one"]


async def test_a_client_may_send_its_requests_in_tasks(client: Client) -> None:
    create = client.create

    async def create_in_task(*arguments: Any, **options: Any) -> CreateResult:
        return await asyncio.create_task(create(*arguments, **options))

    async def look() -> str:
        """Look."""
        return "a lake"

    client.create = create_in_task  # type: ignore[method-assign]
    agent = AssistantAgent("one", client, tools=[look], reflect_on_tool_use=True)
    assert (await run_linked(client, agent))[0] == ["one", "one"]


async def test_a_team_tools_agents_make_their_calls(client: Client) -> None:
    inner = make_team(client, "inner")
    inner_events: list[Event] = []
    inner_link = link(inner, listener=inner_events.append)
    tool = TeamTool(inner, name="look", description="looks")
    agent = AssistantAgent("one", client, tools=[tool], reflect_on_tool_use=True)
    callers, _ = await run_linked(client, agent)
    await inner_link.close()
    assert callers == ["one", "one"]
    assert [each.agent for each in of_kind(inner_events, CallStarted)] == ["inner"]
