"""Every stock team linked on real SGLang: each prompt predicted, each answer the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    MessageFilterAgent,
    SocietyOfMindAgent,
)
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig, PerSourceFilter
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    DiGraphBuilder,
    GraphFlow,
    RoundRobinGroupChat,
    SelectorGroupChat,
)
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryContent
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
)
from autogen_core.models import AssistantMessage, LLMMessage, UserMessage

from flashmoa.autogen import FlashMoAChatCompletionClient, link, watch
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event

from ..engine.support import settled
from .exactness import Found, count, found, mostly_hit

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient
Build = Callable[[Client], BaseGroupChat]


@dataclass
class Told:
    """What was said, by whom, in order, and how each call's prompt was found."""

    said: list[tuple[str, str]]
    calls: list[Found]


async def told(
    client: Client, build: Build, task: str, linked: bool, include: Sequence[str] = ()
) -> Told:
    await client.engine.flush_cache()
    events: list[Event] = []
    team = build(client)
    running = watch(team, events.append)
    if linked:
        running = link(team, include=include, listener=events.append)
    result = await team.run(task=task)
    await running.close()
    said = [(m.source, m.to_text()) for m in result.messages]
    return Told(said, found(events))


async def answered(client: Client, said: list[tuple[str, str]], name: str) -> tuple[str, str]:
    """What an agent says to these messages, outside of any team."""
    messages = [TextMessage(content=text, source=source) for source, text in said]
    response = await agent(client, name).on_messages(messages, CancellationToken())
    return name, response.chat_message.to_text()


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=40,
        extra_body={"ignore_eos": True},
    )
    yield client
    await client.close()


def agent(client: Client, name: str, **more: Any) -> AssistantAgent:
    more = {"system_message": f"You are {name}. " + "Be brief. " * 20, **more}
    return AssistantAgent(name, model_client=client, **more)


def round_robin(client: Client) -> BaseGroupChat:
    return RoundRobinGroupChat([agent(client, n) for n in ("one", "two", "three")], max_turns=7)


def streaming(client: Client) -> BaseGroupChat:
    agents = [agent(client, n, model_client_stream=True) for n in ("one", "two", "three")]
    return RoundRobinGroupChat(agents, max_turns=7)


def bounded(client: Client) -> BaseGroupChat:
    contexts = [
        BufferedChatCompletionContext(3),
        HeadAndTailChatCompletionContext(1, 2),
        BufferedChatCompletionContext(4),
    ]
    names = ("one", "two", "three")
    agents = [agent(client, n, model_context=c) for n, c in zip(names, contexts, strict=True)]
    return RoundRobinGroupChat(agents, max_turns=9)


def remembering(client: Client) -> BaseGroupChat:
    """A memory adds a system message after the text; the stock client takes only one."""
    content = MemoryContent(content="It rains.", mime_type="text/plain")
    memory = ListMemory(memory_contents=[content])
    agents = [agent(client, "one"), agent(client, "two", memory=[memory], system_message=None)]
    return RoundRobinGroupChat(agents, max_turns=2)


def chain(client: Client) -> BaseGroupChat:
    names = ("one", "two", "three")
    agents = [agent(client, n) for n in names]
    builder = DiGraphBuilder()
    for one in agents:
        builder.add_node(one)
    builder.add_edge(agents[0], agents[1]).add_edge(agents[1], agents[2])
    return GraphFlow(agents, graph=builder.build())


def fan(client: Client, filtered: bool = False) -> BaseGroupChat:
    chair = agent(client, "chair")
    reviewers: list[Any] = [agent(client, f"rev{i}") for i in range(3)]
    meta: Any = agent(client, "meta")
    if filtered:
        wanted = [PerSourceFilter(source=n) for n in ("user", "rev0", "rev1", "rev2")]
        meta = MessageFilterAgent("meta", meta, MessageFilterConfig(per_source=wanted))
    builder = DiGraphBuilder()
    for one in (chair, *reviewers, meta):
        builder.add_node(one)
    for one in reviewers:
        builder.add_edge(chair, one).add_edge(one, meta)
    return GraphFlow([chair, *reviewers, meta], graph=builder.build())


def filtered_fan(client: Client) -> BaseGroupChat:
    return fan(client, filtered=True)


def conditional(client: Client) -> BaseGroupChat:
    """Whatever the writer says, one of the two is chosen."""
    writer, yes, no = (agent(client, n) for n in ("writer", "yes", "no"))
    builder = DiGraphBuilder()
    for one in (writer, yes, no):
        builder.add_node(one)
    builder.add_edge(writer, yes, condition=lambda m: len(m.to_text()) % 2 == 0)
    builder.add_edge(writer, no, condition=lambda m: len(m.to_text()) % 2 == 1)
    return GraphFlow([writer, yes, no], graph=builder.build())


def cycle(client: Client) -> BaseGroupChat:
    """The editor sends the writer round again until the team is stopped."""
    writer, editor, printer = (agent(client, n) for n in ("writer", "editor", "printer"))
    builder = DiGraphBuilder()
    for one in (writer, editor, printer):
        builder.add_node(one)
    builder.add_edge(writer, editor)
    builder.add_edge(editor, writer, condition=lambda m: "print!" not in m.to_text())
    builder.add_edge(editor, printer, condition=lambda m: "print!" in m.to_text())
    builder.set_entry_point(writer)
    stop = MaxMessageTermination(8)
    return GraphFlow([writer, editor, printer], graph=builder.build(), termination_condition=stop)


def selecting(client: Client) -> BaseGroupChat:
    """By a tiny model, which names nobody: the selector asks again, and takes the last one."""
    agents = [agent(client, n) for n in ("one", "two", "three")]
    return SelectorGroupChat(
        agents,
        model_client=client,
        termination_condition=MaxMessageTermination(5),
        max_selector_attempts=1,
        allow_repeated_speaker=True,
    )


def nested(client: Client) -> BaseGroupChat:
    inner = RoundRobinGroupChat([agent(client, n) for n in ("in1", "in2")], max_turns=2)
    return RoundRobinGroupChat([agent(client, "one"), inner, agent(client, "two")], max_turns=3)


def society(client: Client) -> BaseGroupChat:
    inner = RoundRobinGroupChat([agent(client, n) for n in ("in1", "in2")], max_turns=2)
    minds = SocietyOfMindAgent("minds", team=inner, model_client=client)
    return RoundRobinGroupChat([agent(client, "one"), minds, agent(client, "two")], max_turns=3)


# Calls that nothing can be known of before: the first ones, and an agent's second in a row.
@pytest.mark.parametrize(
    ("build", "unlinked"),
    [
        (round_robin, "one"),
        (streaming, "one"),
        (bounded, "one"),
        (remembering, "one"),
        (chain, "one"),
        (fan, "chair"),
        (filtered_fan, "chair"),
        (conditional, "writer"),
        (cycle, "writer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_every_linkable_call_is_predicted_and_nothing_changes(
    model_client: Client, client: EngineClient, guide: str, build: Build, unlinked: str
) -> None:
    task = guide[:800]
    linked = await told(model_client, build, task, linked=True)
    plain = await told(model_client, build, task, linked=False)
    assert sorted(linked.said[:-1]) == sorted(plain.said[:-1])
    last = plain.said[-1]
    if build is fan:  # It reads the reviewers as they finish, which is a race.
        last = await answered(model_client, linked.said[:-1], "meta")
    assert linked.said[-1] == last
    first, *calls = linked.calls
    assert first.agent == unlinked and first.status is None
    count(build.__name__, calls)
    assert {call.status for call in calls} <= {"hit", "late"}
    assert mostly_hit(calls)
    await settled(client)


@pytest.mark.parametrize(
    ("build", "unlinked"),
    [(selecting, ["(manager)"]), (nested, ["one", "in1"]), (society, ["one", "in1"])],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_teams_in_which_not_all_is_known(
    model_client: Client, client: EngineClient, guide: str, build: Build, unlinked: list[str]
) -> None:
    """What nobody can tell: the first call, and the first one of a team within the team."""
    task = guide[:800]
    plain = await told(model_client, build, task, linked=False)
    linked = await told(model_client, build, task, linked=True)
    assert linked.said == plain.said
    calls = list(linked.calls)
    for name in unlinked:
        first = next(call for call in calls if call.agent == name)
        assert first.status is None
        calls.remove(first)
    count(build.__name__, calls)
    assert {call.status for call in calls} <= {"hit", "late"}
    assert mostly_hit(calls)
    await settled(client)


class Custom(BaseChatAgent):
    """Keeps its messages itself, and says what its model says."""

    def __init__(self, name: str, model_client: Client) -> None:
        super().__init__(name, "Of a class of its own.")
        self._model_client = model_client
        self._heard: list[LLMMessage] = [UserMessage(content="Be brief. " * 20, source="user")]

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        self._heard += [message.to_model_message() for message in messages]
        result = await self._model_client.create(self._heard, cancellation_token=cancellation_token)
        self._heard.append(AssistantMessage(content=str(result.content), source=self.name))
        return Response(chat_message=TextMessage(content=str(result.content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        del self._heard[1:]


def custom(client: Client) -> BaseGroupChat:
    members = [agent(client, "one"), Custom("mine", client), agent(client, "two")]
    return RoundRobinGroupChat(members, max_turns=6)


@pytest.mark.parametrize("include", [(), ("mine",)])
async def test_custom_agents_are_linked_on_request(
    model_client: Client, client: EngineClient, guide: str, include: tuple[str, ...]
) -> None:
    task = guide[:800]
    plain = await told(model_client, custom, task, linked=False)
    linked = await told(model_client, custom, task, linked=True, include=include)
    assert linked.said == plain.said
    mine = [call for call in linked.calls if call.agent == "mine"]
    assert len(mine) == 2
    if include:
        count("custom, included", linked.calls[1:])
        assert {call.status for call in linked.calls[1:]} <= {"hit", "late"}
        assert mostly_hit(linked.calls[1:])
    else:
        assert {call.status for call in mine} == {None}
    await settled(client)


async def test_names_that_are_wrong_are_said(model_client: Client) -> None:
    with pytest.raises(ValueError, match=r"include names \['four'\]; the team has"):
        link(round_robin(model_client), include=["four"])
    with pytest.raises(ValueError, match=r"on_failure names \['four'\]; the team has"):
        link(round_robin(model_client), on_failure={"four": "finalize"})
    with pytest.raises(ValueError, match="error must be 'abort' or 'finalize'"):
        link(round_robin(model_client), on_failure="ignore")  # type: ignore[arg-type]
