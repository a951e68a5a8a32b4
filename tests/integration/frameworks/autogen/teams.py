"""Teams that tests run: every stock kind, and one with an agent of a user-defined class."""

import json
from collections.abc import Callable, Iterable, Sequence
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
    Swarm,
)
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryContent
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
)
from autogen_core.models import AssistantMessage, LLMMessage, UserMessage

from flashmoa.autogen import SELECTOR_PROMPT
from tests.integration.frameworks.autogen.runs import Client
from tests.integration.scripted import script

Build = Callable[[Client], BaseGroupChat]


def agent(client: Client, name: str, **more: Any) -> AssistantAgent:
    more = {"system_message": f"You are {name}. " + "Be brief. " * 20, **more}
    return AssistantAgent(name, model_client=client, **more)


def agents(client: Client, names: str, **more: Any) -> list[Any]:
    return [agent(client, name, **more) for name in names.split()]


def graph(
    members: Sequence[Any], edges: Iterable[tuple[int, int]], conditions: Any = None, **more: Any
) -> GraphFlow:
    """Make a team of a graph, whose edges are pairs of positions.

    Args:
        conditions: the conditions of edges that have one.
    """
    builder = DiGraphBuilder()
    for member in members:
        builder.add_node(member)
    for start, end in edges:
        condition = (conditions or {}).get((start, end))
        builder.add_edge(members[start], members[end], condition=condition)
    if any(end == 0 for _, end in edges):
        builder.set_entry_point(members[0])
    return GraphFlow(list(members), graph=builder.build(), **more)


def filtered(member: Any, sources: Sequence[str]) -> MessageFilterAgent:
    wanted = [PerSourceFilter(source=source) for source in sources]
    return MessageFilterAgent(member.name, member, MessageFilterConfig(per_source=wanted))


def round_robin(client: Client) -> BaseGroupChat:
    return RoundRobinGroupChat(agents(client, "one two three"), max_turns=7)


def streaming(client: Client) -> BaseGroupChat:
    members = agents(client, "one two three", model_client_stream=True)
    return RoundRobinGroupChat(members, max_turns=7)


def bounded(client: Client) -> BaseGroupChat:
    contexts = {
        "one": BufferedChatCompletionContext(3),
        "two": HeadAndTailChatCompletionContext(1, 2),
        "three": BufferedChatCompletionContext(4),
    }
    members: list[Any] = [agent(client, n, model_context=c) for n, c in contexts.items()]
    return RoundRobinGroupChat(members, max_turns=9)


def remembering(client: Client) -> BaseGroupChat:
    """Make a team with a memory, which adds a system message after the text.

    The stock client takes only one system message, so the second agent has no other.
    """
    content = MemoryContent(content="It rains.", mime_type="text/plain")
    memory = ListMemory(memory_contents=[content])
    members = [agent(client, "one"), agent(client, "two", memory=[memory], system_message=None)]
    return RoundRobinGroupChat(members, max_turns=2)


def chain(client: Client) -> BaseGroupChat:
    return graph(agents(client, "one two three"), [(0, 1), (1, 2)])


FAN = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]


def fan(client: Client) -> BaseGroupChat:
    return graph(agents(client, "chair rev0 rev1 rev2 meta"), FAN)


def filtered_fan(client: Client) -> BaseGroupChat:
    *writers, meta = agents(client, "chair rev0 rev1 rev2 meta")
    return graph([*writers, filtered(meta, ("user", "rev0", "rev1", "rev2"))], FAN)


def conditional(client: Client) -> BaseGroupChat:
    """Make a team whose writer's text decides which of two agents follows."""
    conditions = {
        (0, 1): lambda m: len(m.to_text()) % 2 == 0,
        (0, 2): lambda m: len(m.to_text()) % 2 == 1,
    }
    return graph(agents(client, "writer yes no"), conditions, conditions)


def cycle(client: Client) -> BaseGroupChat:
    """Make a team whose editor sends the writer round again until the team is stopped."""
    conditions = {
        (1, 0): lambda m: "print!" not in m.to_text(),
        (1, 2): lambda m: "print!" in m.to_text(),
    }
    stop = MaxMessageTermination(8)
    members = agents(client, "writer editor printer")
    return graph(members, [(0, 1), *conditions], conditions, termination_condition=stop)


def selecting(client: Client, names: str = "one two three", messages: int = 5) -> BaseGroupChat:
    """Make a team whose selector falls back to the last speaker, as a tiny model gives no name."""
    return SelectorGroupChat(
        agents(client, names),
        model_client=client,
        termination_condition=MaxMessageTermination(messages),
        max_selector_attempts=1,
        allow_repeated_speaker=True,
    )


def prompted(client: Client) -> BaseGroupChat:
    return SelectorGroupChat(
        agents(client, "one two three"),
        model_client=client,
        selector_prompt=SELECTOR_PROMPT,
        termination_condition=MaxMessageTermination(6),
    )


def nested(client: Client) -> BaseGroupChat:
    inner = RoundRobinGroupChat(agents(client, "in1 in2"), max_turns=2)
    return RoundRobinGroupChat([agent(client, "one"), inner, agent(client, "two")], max_turns=3)


def society(client: Client) -> BaseGroupChat:
    inner = RoundRobinGroupChat(agents(client, "in1 in2"), max_turns=2)
    minds = SocietyOfMindAgent("minds", team=inner, model_client=client)
    return RoundRobinGroupChat([agent(client, "one"), minds, agent(client, "two")], max_turns=3)


def swarm(client: Client, handoffs: dict[str, list[str]], turns: int, **more: Any) -> Swarm:
    members = [agent(client, name, handoffs=to, **more) for name, to in handoffs.items()]
    return Swarm(members, termination_condition=MaxMessageTermination(turns))


def orchestrate(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Script an orchestrator, which lets a coder and a writer take ``turns`` turns together.

    Return the model info that its client must have, and the list of its requests for a ledger:
    without structured output a ledger is an ordinary completion.
    """
    ledgers: list[dict[str, Any]] = []

    def answer_to(request: dict[str, Any]) -> Any:
        if "response_format" not in request:
            return None
        ledgers.append(request)
        answers = {
            "is_request_satisfied": len(ledgers) == turns + 1,
            "is_progress_being_made": True,
            "is_in_loop": False,
            "instruction_or_question": "Go on.",
            "next_speaker": ("coder", "writer")[len(ledgers) % 2],
        }
        return json.dumps({key: {"reason": "so", "answer": a} for key, a in answers.items()})

    script(monkeypatch, answer_to)
    info = dict.fromkeys(("vision", "structured_output", "multiple_system_messages"), False)
    return info | {"function_calling": True, "json_output": True, "family": "unknown"}, ledgers


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
