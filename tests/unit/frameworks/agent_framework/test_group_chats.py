"""Test the links of group chats, whose speakers a function or a manager chooses; no engine."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentExecutor,
    AgentSession,
    ChatResponse,
    Content,
    Executor,
    Message,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)
from agent_framework._workflows import _workflow_context
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from agent_framework.orchestrations import (
    GroupChatBuilder,
    GroupChatOrchestrator,
    GroupChatRequestMessage,
    GroupChatState,
)
from agent_framework_orchestrations._base_group_chat_orchestrator import (
    GroupChatParticipantMessage,
    GroupChatResponseMessage,
    ParticipantRegistry,
)

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.link import planner
from flashmoa.link.reasons import OTHER_COURSE
from flashmoa.observe.events import FIRST, LATE
from tests.unit.frameworks.agent_framework.fakes import agent, call_tool
from tests.unit.frameworks.agent_framework.forecasts import ChatRunner, prose

NAMES = ["a", "b", "c"]


def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 42"


def in_turn(state: GroupChatState) -> str:
    return NAMES[state.current_round % 3]


def group_chat(
    client: FlashMoAChatClient,
    members: Sequence[Any] | None = None,
    *,
    rounds: int = 7,
    **more: Any,
) -> GroupChatBuilder:
    """Make the builder of a chat whose members speak in turn; b has a tool."""
    if members is None:
        members = [agent(client, name, tools=[look] if name == "b" else None) for name in NAMES]
    return GroupChatBuilder(participants=members, selection_func=in_turn, max_rounds=rounds, **more)


def by_function(client: FlashMoAChatClient, **more: Any) -> Workflow:
    return group_chat(client, **more).build()


def by_manager(client: FlashMoAChatClient, **more: Any) -> Workflow:
    members = [agent(client, name) for name in NAMES]
    return GroupChatBuilder(
        participants=members, orchestrator_agent=agent(client, "boss"), max_rounds=12, **more
    ).build()


def decisions(order: str) -> Any:
    """Return a script: the manager chooses the agents in this order, and then ends the chat."""
    chosen = iter(order)

    def write(name: str, number: int, body: Mapping[str, Any]) -> str:
        if name != "boss":
            return prose(name, number, body)
        speaker = next(chosen, None)
        decision = {"terminate": speaker is None, "reason": "so", "next_speaker": speaker}
        return json.dumps({**decision, "final_message": "Bye." if speaker is None else None})

    return write


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_of_a_chosen_speaker_was_forecast(
    chats: ChatRunner, stream: bool
) -> None:
    chat = await chats.run(by_function(chats.client()), stream=stream)
    assert chat.asked == [*"abcabca"]
    assert chat.verdicts == ["none", *["exact"] * 6]
    assert chat.statuses == [None, *["hit"] * 6]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_manager_and_those_whom_it_chooses_were_forecast(
    chats: ChatRunner, stream: bool
) -> None:
    """The first speaker's prompt is known while the manager decides on the task."""
    chat = await chats.run(by_manager(chats.client(decisions("abcab"))), stream=stream)
    assert "".join(chat.asked).replace("boss", ".") == ".a.b.c.a.b."
    assert chat.verdicts == ["none", *["exact"] * 10]
    assert chat.statuses == [None, *["hit"] * 10]


async def test_an_agent_that_is_chosen_again_is_not_linked(chats: ChatRunner) -> None:
    chat = await chats.run(by_manager(chats.client(decisions("aab"))))
    assert chat.asked == ["boss", "a", "boss", "a", "boss", "b", "boss"]
    assert chat.statuses == [None, "hit", "hit", None, "hit", "hit", "hit"]
    assert chat.calls[3].started.unlinked == "it was not expected to be next"


@pytest.mark.parametrize("manager", [False, True])
async def test_later_runs_are_forecast_like_the_first_one(chats: ChatRunner, manager: bool) -> None:
    """Agents remember earlier runs, and a run may begin before the last one's end is noticed."""
    if manager:
        workflow = by_manager(chats.client(decisions("abc")))
    else:
        order = iter("abca")
        client = chats.client()
        workflow = GroupChatBuilder(
            participants=[agent(client, name) for name in NAMES],
            selection_func=lambda _: next(order),
            termination_condition=lambda said: all(m.author_name in NAMES for m in said[-2:]),
        ).build()
    chat = await chats.run(workflow, "One.", "Two.")
    asked = ".a.b.c.." if manager else "abca"
    assert "".join(chat.asked).replace("boss", ".") == asked
    expected = ["none", *["exact"] * 6, "none"] if manager else ["none", "exact"] * 2
    assert chat.verdicts == expected
    assert chat.statuses == ["hit" if verdict == "exact" else None for verdict in expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("beside", ["", "Let me look."])
async def test_text_beside_calls_of_tools_is_read_by_others(
    chats: ChatRunner, beside: str, stream: bool
) -> None:
    """Each text of an answer is a message; the calls and their results are dropped."""

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        if name == "b" and body["messages"][-1]["role"] != "tool":
            return beside, call_tool("look", what="hut")
        return prose(name, number, body)

    chat = await chats.run(by_function(chats.client(write)), stream=stream)
    assert chat.asked == [*"abbcabbca"]
    again = (2, 6)
    assert [chat.verdicts[place] for place in again] == ["none"] * 2
    others = [verdict for place, verdict in enumerate(chat.verdicts) if place not in (0, *again)]
    assert others == ["exact"] * 6
    assert {chat.statuses[place] for place in (1, 3, 4, 5, 7, 8)} == {"hit"}
    reader = json.dumps(chat.fake and chat.fake.sent[3].prompt)
    assert reader.count("Let me look.") == (1 if beside else 0) and "42" not in reader


async def test_user_defined_code_runs_as_often_as_without_links(chats: ChatRunner) -> None:
    ran: Counter[str] = Counter()

    def choose(state: GroupChatState) -> str:
        ran["selection"] += 1
        return in_turn(state)

    def ends(_: Sequence[Message]) -> bool:
        ran["condition"] += 1
        return False

    def build() -> Workflow:
        members = [agent(client, name) for client in [chats.client()] for name in NAMES]
        return GroupChatBuilder(
            participants=members,
            selection_func=choose,
            termination_condition=ends,
            max_rounds=4,
        ).build()

    await build().run("Find a hut.")
    unlinked, _ = ran.copy(), ran.clear()
    chat = await chats.run(build())
    assert ran == unlinked and chat.statuses == [None, *["hit"] * 3]


async def test_forecasts_are_not_traced(chats: ChatRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: Counter[str] = Counter()
    create = _workflow_context.create_workflow_span

    def count(name: str, *args: Any, **more: Any) -> Any:
        spans[name] += 1
        return create(name, *args, **more)

    monkeypatch.setattr(_workflow_context, "create_workflow_span", count)
    await by_function(chats.client()).run("Find a hut.")
    unlinked, _ = spans.copy(), spans.clear()
    await chats.run(by_function(chats.client()))
    assert spans == unlinked and spans.total() > 7


class Mine(GroupChatOrchestrator): ...


def by_own_orchestrator(client: FlashMoAChatClient) -> Workflow:
    members = [AgentExecutor(agent(client, name)) for name in NAMES]
    mine = Mine("mine", ParticipantRegistry(members), in_turn, max_rounds=3)
    return GroupChatBuilder(participants=members, orchestrator=mine).build()


def by_changed_orchestrator(client: FlashMoAChatClient) -> Workflow:
    workflow = by_function(client, rounds=3)
    orchestrator: Any = workflow.get_start_executor()
    orchestrator._get_next_speaker = orchestrator._get_next_speaker
    return workflow


@pytest.mark.parametrize(
    ("build", "name"),
    [(by_own_orchestrator, "Mine"), (by_changed_orchestrator, "GroupChatOrchestrator")],
)
async def test_rules_of_ones_own_are_refused_in_words(
    chats: ChatRunner, build: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flashmoa"):
        chat = await chats.run(build(chats.client()))
    reason = f"its workflow's {name} has rules that are not Agent Framework's own"
    assert f"links nothing: {reason}" in caplog.messages[0]
    assert [call.started.unlinked for call in chat.calls] == [FIRST, reason, reason]
    assert chat.statuses == [None] * 3


class Custom(Executor):
    """A participant of the user's own, which asks a model, and notes the messages it handles."""

    handled = 0

    def __init__(self, client: FlashMoAChatClient) -> None:
        super().__init__("b")
        self._client = client

    @handler
    async def note(self, message: GroupChatParticipantMessage, ctx: WorkflowContext) -> None:
        Custom.handled += 1

    @handler
    async def speak(
        self, request: GroupChatRequestMessage, ctx: WorkflowContext[GroupChatResponseMessage]
    ) -> None:
        Custom.handled += 1
        asked = [Message("system", ["You are b."]), Message("user", ["Speak."])]
        text = (await self._client.get_response(asked)).text
        said = Message("assistant", [text.upper()], author_name="b")
        await ctx.send_message(GroupChatResponseMessage(said))


async def test_participants_of_ones_own_are_not_run_ahead(chats: ChatRunner) -> None:
    def build() -> Workflow:
        client = chats.client()
        members = [agent(client, "a"), Custom(client), agent(client, "c")]
        return group_chat(client, members, rounds=4).build()

    await build().run("Find a hut.")
    unlinked, Custom.handled = Custom.handled, 0
    chat = await chats.run(build())
    assert Custom.handled == unlinked
    assert "code of your own, which is not run" in chat.declined["b"]
    # The link to c was made for a message of a, and after a a message of b has come.
    assert chat.statuses == [None, None, None, "hit"]
    assert chat.calls[2].started.unlinked == OTHER_COURSE


async def test_links_to_uncertain_speakers_get_a_share_of_the_pool(chats: ChatRunner) -> None:
    """The manager's turn is certain, unless a condition of the user's may end the chat."""
    taken = "is taken by agents that are likelier to speak"
    chat = await chats.run(by_manager(chats.client(decisions("ab"))), kv_share=0.0)
    assert chat.statuses == [None, None, "hit", None, "hit"]
    assert taken in chat.calls[1].started.unlinked and taken in chat.calls[3].started.unlinked


async def test_a_condition_of_the_users_makes_the_managers_turn_uncertain(
    chats: ChatRunner,
) -> None:
    client = chats.client(decisions("ab"))
    workflow = by_manager(client, termination_condition=lambda _: False)
    chat = await chats.run(workflow, kv_share=0.0)
    assert chat.statuses == [None] * 5


async def test_likelier_speakers_are_linked_first(chats: ChatRunner) -> None:
    linked = link(by_manager(chats.client(decisions("acabaca"))))
    await linked._workflow.run("Find a hut.")
    turns = await linked._planner.upcoming("a")
    assert [turn.agent for turn in turns] == ["boss", "c", "b"]
    await linked.close()


async def test_agents_that_a_manager_uses_as_tools_are_not_taken_for_it(chats: ChatRunner) -> None:
    chosen = iter("ab")

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        if name == "boss" and body["messages"][-1]["role"] != "tool":
            return call_tool("adviser", task="Who?")
        if name != "boss":
            return prose(name, number, body)
        speaker = next(chosen, None)
        return json.dumps({"terminate": speaker is None, "reason": "", "next_speaker": speaker})

    client = chats.client(write)
    adviser = agent(client, "adviser").as_tool(name="adviser", arg_name="task")
    workflow = GroupChatBuilder(
        participants=[agent(client, name) for name in NAMES],
        orchestrator_agent=agent(client, "boss", tools=[adviser]),
        max_rounds=5,
    ).build()
    chat = await chats.run(workflow)
    short = "".join(chat.asked).replace("boss", ".").replace("adviser", "?")
    assert short == ".?.a.?.b.?."
    assert "".join(call.agent for call in chat.calls).replace("boss", ".") == "..a..b.."
    assert [chat.statuses[place] for place in (3, 4, 7, 8)] == ["hit"] * 4
    assert [chat.statuses[place] for place in (1, 5, 9)] == [None] * 3


def with_store(client: FlashMoAChatClient) -> Any:
    return agent(client, "b", default_options={"store": True})


def with_conversation(client: FlashMoAChatClient) -> Any:
    return agent(client, "b", default_options={"conversation_id": "c"})


def with_session(client: FlashMoAChatClient) -> Any:
    return AgentExecutor(agent(client, "b"), session=AgentSession(service_session_id="s"))


def with_responses(_: FlashMoAChatClient) -> Any:
    """Its client keeps histories in the service by default."""
    return agent(OpenAIChatClient("m", api_key="none"), "b")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_store, "a service keeps its history"),
        (with_conversation, "a service keeps its history"),
        (with_session, "a service keeps its history"),
        (with_responses, "its client is not a FlashMoAChatClient"),
    ],
)
async def test_histories_of_a_service_are_refused_in_words(
    chats: ChatRunner, make: Any, reason: str
) -> None:
    client = chats.client()
    members = [agent(client, "a"), make(client), agent(client, "c")]
    order = iter("aca")
    workflow = GroupChatBuilder(
        participants=members, selection_func=lambda _: next(order), max_rounds=3
    ).build()
    chat = await chats.run(workflow)
    assert reason in chat.declined["b"] and chat.statuses == [None, "hit", "hit"]


async def test_several_texts_of_a_message_are_messages_of_their_own(
    chats: ChatRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others do not get the answer as it was written."""
    parse = FlashMoAChatClient._parse_response_from_openai

    def split(client: FlashMoAChatClient, *given: Any) -> ChatResponse:
        response = parse(client, *given)
        (message,) = response.messages
        message.contents = [Content.from_text(part) for part in message.text.split("|")]
        return response

    monkeypatch.setattr(FlashMoAChatClient, "_parse_response_from_openai", split)
    client = chats.client(lambda name, *_: f"{name} says one|and two")
    linked = link(by_function(client, rounds=4), listener=chats.chat.events.append)
    await linked._workflow.run(Message("user", ["Find a hut.", "Find two."]))
    await linked.close()
    assert chats.chat.fake is not None
    sent = chats.chat.fake.sent[1]
    assert (
        "<user>Find a hut.<user>Find two.<assistant:a>a says one<assistant:a>and tw" in sent.prompt
    )
    assert (sent.streamed or "").endswith("<user>Find two.<assistant:a>")
    assert chats.chat.statuses == [None, *["hit"] * 3]


async def test_names_that_requests_show_otherwise_are_forecast(chats: ChatRunner) -> None:
    """Later releases of the client clean names."""
    client = chats.client(lambda *_: "one two three four")
    members = [Agent(client, f"You are {name}.", name=f"the {name}<é>") for name in NAMES]
    names = [member.name for member in members]
    workflow = GroupChatBuilder(
        participants=members,
        selection_func=lambda state: names[state.current_round % 3],
        max_rounds=5,
    ).build()
    chat = await chats.run(workflow)
    assert chat.asked == [*"abcab"] and chat.statuses == [None, *["hit"] * 4]
    assert chat.fake is not None and "<assistant:the" in chat.fake.sent[1].prompt


async def test_a_call_that_was_answered_at_once_comes_too_early_for_a_link(
    chats: ChatRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workflow goes on then, so the next request is not known any more."""
    monkeypatch.setattr(planner, "DELIVERY_SECONDS", 0.3)
    chat = await chats.run(by_function(chats.client(lambda *_: "one"), rounds=3))
    assert chat.statuses == [None] * 3
    assert [call.started.unlinked for call in chat.calls] == [FIRST, LATE, LATE]


def test_a_chat_in_which_only_the_manager_has_a_client_links_nothing(
    chats: ChatRunner, caplog: pytest.LogCaptureFixture
) -> None:
    stock = OpenAIChatCompletionClient("m", api_key="none")
    workflow = GroupChatBuilder(
        participants=[Agent(stock, name=name) for name in NAMES],
        orchestrator_agent=agent(chats.client(), "boss"),
    ).build()
    with caplog.at_level(logging.WARNING, "flashmoa"):
        link(workflow)
    assert "it has no two agents with a FlashMoAChatClient" in caplog.messages[0]


async def test_a_model_that_a_selection_function_asks_is_no_agent_of_the_chat(
    chats: ChatRunner,
) -> None:
    client = chats.client()

    async def choose(state: GroupChatState) -> str:
        await client.get_response([Message("system", ["You are the judge."])])
        return in_turn(state)

    workflow = GroupChatBuilder(
        participants=[agent(client, name) for name in NAMES], selection_func=choose, max_rounds=3
    ).build()
    chat = await chats.run(workflow)
    assert chat.asked == ["the judge", "a", "the judge", "b", "the judge", "c"]
    assert [call.agent for call in chat.calls] == NAMES
    assert [chat.statuses[place] for place in (1, 3, 5)] == [None, "hit", "hit"]


async def test_agents_before_a_chat_are_reported(chats: ChatRunner) -> None:
    client = chats.client()
    intro, *members = [AgentExecutor(agent(client, name)) for name in ("intro", *NAMES)]
    chat = GroupChatOrchestrator("chat", ParticipantRegistry(members), in_turn, max_rounds=3)
    builder = WorkflowBuilder(start_executor=intro, output_from=[chat]).add_edge(intro, chat)
    for each in members:
        builder = builder.add_edge(chat, each).add_edge(each, chat)
    run = await chats.run(builder.build())
    assert run.asked == ["intro", *NAMES]
    assert run.statuses == [None, None, "hit", "hit"]
    assert [call.agent for call in run.calls] == run.asked
    assert run.calls[1].started.unlinked == "it was not expected to be next"
