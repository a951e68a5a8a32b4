"""Test what makes prompts unpredictable: such agents run unlinked, with a reason; no engine."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    ChatContext,
    ChatMiddleware,
    FunctionTool,
    InMemoryHistoryProvider,
    MCPStdioTool,
    Message,
    SlidingWindowStrategy,
    Workflow,
    tool,
)
from agent_framework.orchestrations import ConcurrentBuilder, GroupChatBuilder, SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.observe import Event, LinkOpened, LinkWaits
from tests.unit.frameworks.agent_framework import fakes
from tests.unit.frameworks.agent_framework.fakes import (
    FakeEngine,
    agent,
    call_tool,
    chain,
    make_client,
    run_linked,
)


class Adds(ChatMiddleware):
    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        context.messages = [Message("system", ["policy"]), *context.messages]
        await call_next()


def compacted() -> SlidingWindowStrategy:
    return SlidingWindowStrategy(keep_last_groups=1)


class Counts(FlashMoAChatClient):
    calls = 0

    def get_response(self, messages: Sequence[Message], **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().get_response(messages, **kwargs)


def with_middleware(client: FlashMoAChatClient) -> Any:
    return agent(make_client(middleware=[Adds()])[0], "b")


def of_a_compacting_client(client: FlashMoAChatClient) -> Any:
    changing, _ = make_client()
    changing.compaction_strategy = compacted()
    return agent(changing, "b")


def compacting(client: FlashMoAChatClient) -> Any:
    return agent(client, "b", compaction_strategy=compacted())


def look(place: str) -> str:
    return place


class Own(FunctionTool):
    """Describes itself as the framework does, which nobody but its author knows."""

    def to_json_schema_spec(self) -> dict[str, Any]:
        return super().to_json_schema_spec()


def with_own_tool(client: FlashMoAChatClient) -> Any:
    return agent(client, "b", tools=[Own(name="look", description="Looks.", func=look)])


def with_another_run(client: FlashMoAChatClient) -> Any:
    changed = agent(client, "b")
    original: Any = changed.run

    def run(messages: list[Message], **kwargs: Any) -> Any:
        return original([*messages, Message("user", ["Be brief."])], **kwargs)

    changed.run = run  # type: ignore[method-assign]
    return changed


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (with_middleware, "its client has middleware"),
        (of_a_compacting_client, "it has a compaction strategy"),
        (compacting, "it has a compaction strategy"),
        (with_own_tool, "its tool's Own describes itself by code of your own"),
        (with_another_run, "it is a Agent, not a stock Agent"),
    ],
)
async def test_changed_requests_are_declined_once(
    make: Callable[[FlashMoAChatClient], Any], expected: str
) -> None:
    client, fake = make_client()
    (reason,) = await run_linked(chain(client, make(client)), runs=2)
    assert expected in reason
    assert not any(fake.statuses)


async def test_histories_that_are_loaded_for_each_request_are_known() -> None:
    """The framework adds a middleware of its own to the request."""
    client, fake = make_client()
    history: dict[str, Any] = {"require_per_service_call_history_persistence": True}
    reader = agent(client, "b", context_providers=[InMemoryHistoryProvider()], **history)
    assert await run_linked(chain(client, reader), runs=2) == []
    assert fake.statuses == [None, "hit"] * 2
    assert fake.sent[3].prompt.count("<assistant") > fake.sent[1].prompt.count("<assistant")


async def test_texts_of_clients_with_middleware_stay() -> None:
    (changing, _), (client, fake) = make_client(middleware=[Adds()]), make_client()
    events: list[Event] = []
    rest = [agent(client, name) for name in "bc"]
    workflow = SequentialBuilder(participants=[agent(changing, "a"), *rest]).build()
    link(workflow, listener=events.append)
    await workflow.run("task")
    opened = [event.agent for event in events if isinstance(event, LinkOpened)]
    assert opened == ["c"] and fake.statuses == [None, "hit"]
    assert not [event for event in events if isinstance(event, LinkWaits)]


async def test_middleware_of_a_run_is_declined() -> None:
    client, fake = make_client()
    workflow = chain(client)
    for kwargs, status in (({"middleware": [Adds()]}, None), (None, "hit")):
        fake.sent.clear()
        await run_linked(workflow, client_kwargs=kwargs)
        assert fake.statuses == [None, status]


async def test_mcp_servers_of_a_run_are_not_asked() -> None:
    asked: list[str] = []

    class Server(MCPStdioTool):
        async def connect(self, **_: Any) -> None:
            asked.append("connect")
            self.is_connected = True

        async def _prepare_for_run(self, *_: Any, **__: Any) -> None:
            asked.append("prepare")

        async def close(self) -> None: ...

    client, fake = make_client()
    await chain(client).run("task", tools=[Server(name="m", command="false")])
    unlinked = len(asked)
    asked.clear()
    reasons = await run_linked(chain(client), tools=[Server(name="m", command="false")])
    assert len(asked) == unlinked and len(fake.sent) == 4
    assert len(reasons) == 1 and "MCP servers" in reasons[0]


async def test_a_clients_own_methods_are_not_called() -> None:
    client = Counts("m", base_url="http://127.0.0.1:9/v1")
    fake = FakeEngine(client, lambda _: fakes.ANSWER)
    stock, _ = make_client()
    (reason,) = await run_linked(chain(stock, agent(client, "b")))
    assert "Counts.get_response" in reason
    assert client.calls == len(fake.sent) == 1


@pytest.mark.parametrize("hook", ["message_preparer", "response_parser"])
async def test_hooks_of_a_client_are_not_called(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of later releases have them as arguments."""
    called: list[str] = []
    stock: Any = FlashMoAChatClient._prepare_message_for_openai
    has_hooks = hook in vars(make_client()[0])

    def prepare(self: Any, message: Message) -> Any:
        made = stock(self, message)
        preparer = getattr(self, "message_preparer", None)
        return made if preparer is None else preparer(message, made)

    def note(_: object, made: object) -> object:
        called.append(hook)
        return made

    for kind in FlashMoAChatClient.__mro__:
        if "_prepare_message_for_openai" in vars(kind) and not has_hooks:
            monkeypatch.setattr(kind, "_prepare_message_for_openai", prepare)
    counts: list[int] = []
    for is_linked in (False, True):
        client, fake = make_client()
        hooked: Any = client
        setattr(hooked, hook, note)
        workflow = chain(client)
        reasons = await run_linked(workflow) if is_linked else []
        if not is_linked:
            await workflow.run("task")
        counts.append(len(called))
        called.clear()
    responses = 2 if has_hooks else 0
    assert counts[0] == counts[1] == (5 if hook == "message_preparer" else responses)
    assert [hook in reason for reason in reasons] == [True] and fake.statuses == [None] * 2


class Prepares(Agent[Any]):
    prepared = 0

    async def _prepare_session_and_messages(self, **options: Any) -> Any:
        Prepares.prepared += 1
        return await super()._prepare_session_and_messages(**options)


class Names(Agent[Any]):
    def __init__(self, client: FlashMoAChatClient, name: str) -> None:
        super().__init__(client, f"You are {name}.", name=name)


async def test_methods_of_an_agents_own_class_are_not_called() -> None:
    client, fake = make_client()
    (reason,) = await run_linked(chain(client, Prepares(client, "You are b.", name="b")))
    assert reason == "it is a Prepares, not a stock Agent"
    assert Prepares.prepared == 1 and fake.statuses == [None, None]
    assert await run_linked(chain(client, Names(client, "b"))) == []
    assert fake.statuses[2:] == [None, "hit"]


async def test_agents_without_names_are_linked() -> None:
    """Their messages bear the name that the framework makes up."""
    client, fake = make_client()
    agents = [Agent(client, f"You are {name}.") for name in "ab"]
    assert await run_linked(SequentialBuilder(participants=agents).build()) == []
    assert fake.statuses == [None, "hit"]
    assert "<assistant:UnnamedAgent>" in fake.sent[-1].prompt


async def test_an_agent_after_an_approval_is_not_predicted() -> None:
    """Others also get the tool's result."""

    @tool(approval_mode="always_require")
    def look(place: str) -> str:
        return f"a fine {place}"

    def answer(request: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        messages = request["messages"]
        if request.get("tools") and not any(each["role"] == "tool" for each in messages):
            function = {"name": "look", "arguments": '{"place": "x"}'}
            return [{"id": "1", "type": "function", "function": function}]
        return fakes.ANSWER

    client, fake = make_client(answer)
    agents = [agent(client, "a", tools=[look]), agent(client, "b")]
    workflow = SequentialBuilder(participants=agents).build()
    linked = link(workflow)
    requests = (await workflow.run("task")).get_request_info_events()
    await linked.close()
    events: list[Event] = []
    link(workflow, listener=events.append)  # A link that knows nothing of the first run.
    approved: Any = {
        each.request_id: each.data.to_function_approval_response(approved=True) for each in requests
    }
    await workflow.run(responses=approved)
    assert fake.statuses == [None] * 3
    assert not [event for event in events if isinstance(event, LinkOpened)]


async def test_the_default_aggregator_is_not_reported() -> None:
    client, _ = make_client()

    def build(*agents: Agent[Any]) -> Workflow:
        return ConcurrentBuilder(participants=list(agents)).build()

    assert await run_linked(build(agent(client, "a"), agent(client, "b"))) == []


async def test_code_of_the_users_is_not_run_ahead() -> None:
    client, fake = make_client()
    ran: list[str] = []

    async def merge(results: list[AgentExecutorResponse]) -> str:
        ran.append("merge")
        return (await client.get_response([Message("user", ["Merge."])])).text

    def keep_last(messages: list[Message]) -> list[Message]:
        ran.append("filter")
        return messages[-1:]

    experts = [agent(client, name) for name in "ab"]
    panel = ConcurrentBuilder(participants=experts).with_aggregator(merge).build()
    filtering = AgentExecutor(agent(client, "b"), context_mode="custom", context_filter=keep_last)
    for workflow in (panel, chain(client, filtering)):
        ran.clear()
        (reason,) = await run_linked(workflow)
        assert "code of your own, which is not run" in reason
        assert len(ran) == 1
    assert fake.statuses == [None] * 5


async def test_executors_of_the_framework_are_not_user_code() -> None:
    client, fake = make_client()
    turns = iter("ab")
    chat = GroupChatBuilder(
        participants=[agent(client, "a"), agent(client, "b")],
        max_rounds=2,
        selection_func=lambda _: next(turns),
    )
    assert await run_linked(chat.build()) == []
    assert fake.statuses == [None, "hit"]


async def test_a_tool_may_be_given_without_a_list() -> None:
    client, _ = make_client(lambda _: call_tool("look", place="lake"))
    client.function_invocation_configuration["enabled"] = False
    tools = Own(name="look", description="Looks.", func=look)
    answer = await client.get_response([Message("user", ["Go."])], options={"tools": tools})
    assert answer.messages[0].contents[0].name == "look"
