"""Teams that tests run: every stock kind, and one with an agent of a user-defined class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

from flashmoa.autogen import FlashMoAChatCompletionClient

Client = FlashMoAChatCompletionClient
Build = Callable[[Client], BaseGroupChat]


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
    """Make a team with a memory, which adds a system message after the text.

    The stock client takes only one system message, so the second agent has no other.
    """
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
    """Make a team in which one of two agents follows the writer, depending on its text."""
    writer, yes, no = (agent(client, n) for n in ("writer", "yes", "no"))
    builder = DiGraphBuilder()
    for one in (writer, yes, no):
        builder.add_node(one)
    builder.add_edge(writer, yes, condition=lambda m: len(m.to_text()) % 2 == 0)
    builder.add_edge(writer, no, condition=lambda m: len(m.to_text()) % 2 == 1)
    return GraphFlow([writer, yes, no], graph=builder.build())


def cycle(client: Client) -> BaseGroupChat:
    """Make a team whose editor sends the writer round again until the team is stopped."""
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
    """Make a team whose selector falls back to the last speaker, as a tiny model names nobody."""
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


class Custom(BaseChatAgent):
    """An agent of a user-defined class, which keeps its messages itself."""

    def __init__(self, name: str, model_client: Client) -> None:
        super().__init__(name, "Of a user-defined class.")
        self._model_client = model_client
        self._prompt: list[LLMMessage] = [UserMessage(content="Be brief. " * 20, source="user")]

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        self._prompt += [message.to_model_message() for message in messages]
        result = await self._model_client.create(
            self._prompt, cancellation_token=cancellation_token
        )
        self._prompt.append(AssistantMessage(content=str(result.content), source=self.name))
        return Response(chat_message=TextMessage(content=str(result.content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        del self._prompt[1:]


def custom(client: Client) -> BaseGroupChat:
    members = [agent(client, "one"), Custom("mine", client), agent(client, "two")]
    return RoundRobinGroupChat(members, max_turns=6)
