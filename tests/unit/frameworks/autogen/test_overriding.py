"""Linking runs no user-defined code unless the user includes it, and so changes no answer."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    SocietyOfMindAgent,
)
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, StructuredMessage, TextMessage
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryContent, UpdateContextResult
from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import LLMMessage, UserMessage
from autogen_core.tools import (
    BaseTool,
    FunctionTool,
    StaticStreamWorkbench,
    StaticWorkbench,
    ToolSchema,
)
from pydantic import BaseModel, field_serializer

from flashmoa.autogen import link
from flashmoa.frameworks.autogen import dry_run
from flashmoa.frameworks.autogen.team_link import TeamLinkPlanner
from flashmoa.link.expected import ExpectedRequest, Turn
from flashmoa.link.link import Ahead
from flashmoa.link.prompt import NotForecastable
from flashmoa.observe import Event, LinkDeclined
from tests.unit.events import of_kind
from tests.unit.frameworks.autogen.teams import Client, make_client
from tests.unit.openai.fake_server import FakeServer

# Is called in each run of a method, and returns the number of this run.
CountRun = Callable[[], int]
Build = Callable[[Client, CountRun], BaseGroupChat]


def agent(client: Client, name: str, **more: Any) -> AssistantAgent:
    return AssistantAgent(name, model_client=client, **more)


async def _look(place: str) -> str:
    """Look at a place."""
    return f"a fine {place}"


def _tool() -> FunctionTool:
    return FunctionTool(_look, description="Looks.", name="look")


def _three(
    client: Client, second: BaseChatAgent | None = None, turns: int = 6, **options: Any
) -> BaseGroupChat:
    """Make a team of three; its second and third agent are linked twice."""
    second = second or agent(client, "two", **options)
    members = [agent(client, "one"), second, agent(client, "three")]
    return RoundRobinGroupChat(members, max_turns=turns)


def workbench(client: Client, count_run: CountRun) -> BaseGroupChat:
    """The description of its tools depends on how often the workbench was asked for them."""

    class Stateful(StaticWorkbench):
        async def list_tools(self) -> list[ToolSchema]:
            (tool,) = await super().list_tools()
            return [{**tool, "description": f"Looks, asked {count_run()} times."}]

    return _three(client, workbench=Stateful([_tool()]))


def workbench_of_one(client: Client, count_run: CountRun) -> BaseGroupChat:
    """Only this object has a method of its own, not its class."""
    bench: Any = StaticStreamWorkbench([_tool()])
    stock = bench.list_tools

    async def list_tools() -> list[ToolSchema]:
        count_run()
        return await stock()

    bench.list_tools = list_tools
    return _three(client, workbench=bench)


def tool(client: Client, count_run: CountRun) -> BaseGroupChat:
    class Own(FunctionTool):
        @property
        def schema(self) -> ToolSchema:
            return {**super().schema, "description": f"Looks, asked {count_run()} times."}

    return _three(client, tools=[Own(_look, description="Looks.", name="look")])


def stream(client: Client, count_run: CountRun) -> BaseGroupChat:
    class Own(AssistantAgent):
        async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
            count_run()
            async for item in super().on_messages_stream(messages, cancellation_token):
                yield item

    return _three(client, Own("two", model_client=client))


def society(client: Client, count_run: CountRun) -> BaseGroupChat:
    class Own(SocietyOfMindAgent):
        async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
            self._response_prompt = f"Answer. This is turn {count_run()}."
            async for item in super().on_messages_stream(messages, cancellation_token):
                yield item

    inner = RoundRobinGroupChat([agent(client, n) for n in ("in1", "in2")], max_turns=2)
    return _three(client, Own("two", team=inner, model_client=client))


def context(client: Client, count_run: CountRun) -> BaseGroupChat:
    class Own(UnboundedChatCompletionContext):
        async def get_messages(self) -> list[LLMMessage]:
            count_run()
            return await super().get_messages()

    return _three(client, model_context=Own())


def memory(client: Client, count_run: CountRun) -> BaseGroupChat:
    class Own(ListMemory):
        async def update_context(self, model_context: ChatCompletionContext) -> UpdateContextResult:
            count_run()
            return await super().update_context(model_context)

    kept = Own(memory_contents=[MemoryContent(content="It rains.", mime_type="text/plain")])
    return _three(client, turns=3, memory=[kept], system_message=None)


class NumberedMessage(TextMessage):
    """A message whose text has the number of times it was turned into text."""

    type: Any = "NumberedMessage"
    count_run: Any = None

    def to_model_message(self) -> UserMessage:
        return UserMessage(content=f"{self.content} ({self.count_run()})", source=self.source)


class FixedSpeaker(BaseChatAgent):
    """Always says the same; calls no model."""

    def __init__(self, name: str, count_run: CountRun) -> None:
        super().__init__(name, "Says the same.")
        self._count_run = count_run

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (NumberedMessage,)

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        message = NumberedMessage(content="I see.", source=self.name, count_run=self._count_run)
        return Response(chat_message=message)

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


def message(client: Client, count_run: CountRun) -> BaseGroupChat:
    """Each time a dry run turns the second agent's message into text, the text changes."""
    one, three, four = (agent(client, name) for name in ("one", "three", "four"))
    members = [one, FixedSpeaker("two", count_run), three, four]
    return RoundRobinGroupChat(members, max_turns=8, custom_message_types=[NumberedMessage])


def manager(client: Client, count_run: CountRun) -> BaseGroupChat:
    class Manager(SelectorGroupChatManager):
        def construct_message_history(self, message_history: list[LLMMessage]) -> str:
            return f"{super().construct_message_history(message_history)} ({count_run()})"

    class Own(SelectorGroupChat):
        def _create_group_chat_manager_factory(self, **kwargs: Any) -> Any:
            make: Any = super()._create_group_chat_manager_factory(**kwargs)

            def make_own() -> SelectorGroupChatManager:
                manager = make()
                manager.__class__ = Manager
                return manager

            return make_own

    members = [agent(client, name) for name in ("one", "two", "three")]
    return Own(members, model_client=client, max_turns=4, max_selector_attempts=1)


class CountingClient(Client):
    """A client whose requests contain how many it has made."""

    count_run: CountRun

    def _process_create_args(self, *args: Any, **kwargs: Any) -> Any:
        params = super()._process_create_args(*args, **kwargs)
        params.messages[0]["content"] += f" This is request {self.count_run()}."  # type: ignore[index,operator]
        return params


def client(plain: Client, count_run: CountRun) -> BaseGroupChat:
    own = CountingClient.__new__(CountingClient)
    vars(own).update(vars(plain), count_run=count_run)
    return _three(plain, agent(own, "two"))


@dataclass
class Run:
    """The number of calls of user-defined code in a run, the requests, and the declined links."""

    runs: int
    sent: list[Any]
    predicted: int
    declined: dict[str, str]


async def run_team(
    monkeypatch: pytest.MonkeyPatch, build: Build, linked: bool, *include: str
) -> Run:
    server, events, numbers = FakeServer(), list[Event](), itertools.count(1)
    client = make_client()
    team = build(client, lambda: next(numbers))
    ahead: Ahead = "text" if linked else "nothing"
    running = link(team, ahead=ahead, include=include, listener=events.append)
    planners = [each._planner for each in (running, *running._inner)]
    expected: list[ExpectedRequest] = []
    expect = TeamLinkPlanner.expect

    async def count(planner: TeamLinkPlanner, turn: Turn) -> ExpectedRequest:
        expected.append(await expect(planner, turn))
        return expected[-1]

    monkeypatch.setattr(TeamLinkPlanner, "expect", count)

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        await request.aread()
        while any(planner._planning.is_running for planner in planners):  # noqa: ASYNC110
            await anyio.sleep(0.001)
        return server.answer(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    await team.run(task="Three days in Nepal.")
    await running.close()
    await client.close()
    declined = {each.agent: each.reason for each in of_kind(events, LinkDeclined)}
    sent = [body["messages"] for body in server.bodies()]
    return Run(next(numbers) - 1, sent, len(expected), declined)


@pytest.mark.parametrize(
    ("build", "declined"),
    [
        (workbench, {"two": "code of its Stateful"}),
        (workbench_of_one, {"two": "code of its StaticStreamWorkbench"}),
        (tool, {"two": "would run Own.schema"}),
        (stream, {"two": "it is a Own, not a stock AssistantAgent"}),
        (society, {"(summary)": "code of its Own"}),
        (context, {"two": "its Own chooses messages"}),
        (memory, {}),
        (message, {"one": "Numbered", "two": "it has no FlashMoA", "four": "Numbered"}),
        (manager, {}),
        (client, {"two": "would run CountingClient._process_create_args"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_own_code_runs_as_often_as_unlinked(
    monkeypatch: pytest.MonkeyPatch, build: Build, declined: dict[str, str]
) -> None:
    plain = await run_team(monkeypatch, build, linked=False)
    linked = await run_team(monkeypatch, build, linked=True)
    assert plain.runs == linked.runs > 0
    assert linked.sent == plain.sent
    # The other agents' prompts are predicted, unless a manager of another class chooses the agents.
    assert linked.predicted > 0 or build is manager
    assert linked.declined.keys() == declined.keys()
    for agent, reason in linked.declined.items():
        assert declined[agent] in reason


@pytest.mark.parametrize("build", [stream, workbench_of_one], ids=lambda build: build.__name__)
async def test_code_of_included_agents_is_run_ahead(
    monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    plain = await run_team(monkeypatch, build, linked=False)
    linked = await run_team(monkeypatch, build, True, "two")
    assert linked.runs > plain.runs
    assert linked.sent == plain.sent
    assert not linked.declined


class _Counts(BaseChatAgent):
    turns: list[int]

    async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
        self.turns.append(len(messages))
        async for item in super().on_messages_stream(messages, cancellation_token):
            yield item


class Filtered(_Counts, MessageFilterAgent): ...


class Minds(_Counts, SocietyOfMindAgent): ...


@pytest.mark.parametrize("kind", [Filtered, Minds])
async def test_included_agents_keep_their_own_lists(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    kept: list[list[int]] = []

    def build(client: Client, _count_run: CountRun) -> BaseGroupChat:
        inner, team = agent(client, "two"), _three(client, agent(client, "in"), turns=2)
        second = (
            Filtered("two", inner, MessageFilterConfig(per_source=[]))
            if kind is Filtered
            else Minds("two", team=team, model_client=client)
        )
        second.turns = []
        kept.append(second.turns)
        return _three(client, second, turns=3)

    await run_team(monkeypatch, build, linked=False)
    await run_team(monkeypatch, build, True, "two")
    assert kept[0] == kept[1] != []


class WithSerializer(BaseModel):
    city: str

    @field_serializer("city")
    def serialize_city(self, city: str) -> str:
        return city.upper()


def test_messages_with_serializers_are_own_code() -> None:
    class Plain(BaseModel):
        city: str

    stock = StructuredMessage[Plain](content=Plain(city="Pokhara"), source="a")
    dry_run.require_stock_message(stock)
    other = StructuredMessage[WithSerializer](content=WithSerializer(city="Pokhara"), source="a")
    with pytest.raises(NotForecastable, match="serializers of WithSerializer"):
        dry_run.require_stock_message(other)


def test_a_tool_with_a_stock_prompt_may_have_code() -> None:
    class Counting(FunctionTool):
        async def run(self, *args: Any, **kwargs: Any) -> Any: ...

    dry_run.require_stock_methods(Counting(_look, description=""), BaseTool)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_no_copy_of_an_agent_with_a_team_is_run(is_filtered: bool) -> None:
    """The copy would ask the agents of the real team."""
    client = make_client()
    inner = RoundRobinGroupChat([agent(client, "inner")])
    subject: Any = SocietyOfMindAgent("minds", team=inner, model_client=client)
    if is_filtered:
        subject = MessageFilterAgent("minds", subject, MessageFilterConfig(per_source=[]))
    with pytest.raises(NotForecastable, match="has a team of its own"):
        dry_run.agent_dry_runs(subject, [], included=True)
