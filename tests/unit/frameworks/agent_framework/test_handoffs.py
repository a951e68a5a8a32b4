"""Test the links of chats whose agents hand off to each other; no engine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agent_framework import (
    Agent,
    ChatContext,
    ChatMiddleware,
    InMemoryHistoryProvider,
    Message,
    Workflow,
)
from agent_framework.orchestrations import HandoffAgentUserRequest, HandoffBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.observe import LinkOpened
from tests.unit.frameworks.agent_framework.fakes import agent, call_tool
from tests.unit.frameworks.agent_framework.forecasts import ChatRunner, Script, prose
from tests.unit.frameworks.agent_framework.test_group_chats import NAMES, look

NEXT = {"a": "b", "b": "c", "c": "a"}


def member(client: FlashMoAChatClient, name: str, **more: Any) -> Agent[Any]:
    return agent(client, name, require_per_service_call_history_persistence=True, **more)


def is_done(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1].text == "Done."


def handoff(
    client: FlashMoAChatClient, *, ends: Any = is_done, storage: Any = None, **more: Any
) -> Workflow:
    members = [member(client, name, **more) for name in NAMES]
    builder = HandoffBuilder(
        participants=members, termination_condition=ends, checkpoint_storage=storage
    )
    return builder.with_start_agent(members[0]).with_autonomous_mode().build()


def hand_on(calls: int, beside: str = "Next, {name}.") -> Script:
    """Return a script: each agent hands off to the next agent, until ``calls`` calls are made."""
    made: Counter[str] = Counter()

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        made["all"] += 1
        if made["all"] == calls:
            return "Done."
        return beside.format(name=name), call_tool(f"handoff_to_{NEXT[name]}")

    return write


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("beside", ["", "Next, {name}."])
async def test_the_agents_that_may_take_over_were_forecast(
    chats: ChatRunner, beside: str, stream: bool
) -> None:
    """Also what the start agent has sent all others, and not delivered yet."""
    chat = await chats.run(handoff(chats.client(hand_on(7, beside))), stream=stream)
    assert chat.asked == [*"abcabca"]
    assert chat.verdicts == ["none", *["exact"] * 6]
    assert chat.statuses == [None, *["hit"] * 6]
    # The text beside a handoff is prefilled with the request, all before it ahead.
    assert chat.fake is not None
    for number, sent in enumerate(chat.fake.sent[1:], 1):
        assert sent.streamed is not None
        spoken = [f"Next, {name}." for name in chat.asked[: number - 1]]
        assert "Find a hut." in sent.streamed
        assert all(text in sent.streamed for text in spoken if beside)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_hand_off_to_nobody_are_known(chats: ChatRunner, stream: bool) -> None:
    """Then the agent is asked again, which is not linked, within the same superstep."""
    hands_on = hand_on(5, "")

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        is_first = name == "a" and number < 3
        return prose(name, number, body) if is_first else hands_on(name, number, body)

    chat = await chats.run(handoff(chats.client(write)), stream=stream)
    assert chat.asked == [*"aaabcab"]
    assert chat.verdicts == [*["none"] * 3, *["exact"] * 4]
    assert chat.statuses == [*[None] * 3, *["hit"] * 4]
    assert chat.fake is not None
    assert 'a "2"' in (chat.fake.sent[3].streamed or "")


async def test_texts_beside_other_tools_are_read_by_others(chats: ChatRunner) -> None:
    hands_on = hand_on(5)

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        if name == "b" and body["messages"][-1]["role"] != "tool":
            return "Let me look.", call_tool("look", what="hut")
        return hands_on(name, number, body)

    chat = await chats.run(handoff(chats.client(write), tools=[look]))
    assert chat.asked == [*"abbcabb"]
    assert [chat.verdicts[place] for place in (1, 3, 4, 5)] == ["exact"] * 4
    assert [chat.statuses[place] for place in (1, 3, 4, 5)] == ["hit"] * 4
    assert chat.fake is not None and "Let me look." in (chat.fake.sent[3].streamed or "")
    assert "42" not in chat.fake.sent[3].prompt


async def test_only_agents_that_the_writer_can_hand_off_to_are_linked(chats: ChatRunner) -> None:
    client = chats.client(hand_on(3))
    one, two, three = (member(client, name) for name in NAMES)
    builder = HandoffBuilder(participants=[one, two, three], termination_condition=is_done)
    builder = builder.with_start_agent(one).add_handoff(one, [two]).add_handoff(two, [three])
    linked = link(builder.build(), listener=chats.chat.events.append)
    await linked._workflow.run("Find a hut.")
    await linked.close()
    opened = [each.agent for each in chats.chat.events if isinstance(each, LinkOpened)]
    assert opened == ["b", "c"] and chats.chat.statuses == [None, "hit", "hit"]


@pytest.mark.parametrize("returns", [True, False])
async def test_the_users_replies_lose_nothing(chats: ChatRunner, returns: bool) -> None:
    """A run ends when an agent hands off to nobody, and the next one begins with the reply."""
    hands_on = hand_on(100, "")

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        asks = name == "b" and number == 1
        return "Which one?" if asks else hands_on(name, number, body)

    client = chats.client(write)
    members = [member(client, name) for name in NAMES]
    builder = HandoffBuilder(
        participants=members,
        termination_condition=lambda said: chats.chat.counts["c"] == 2,
    ).with_start_agent(members[0])
    if not returns:
        builder = builder.enable_return_to_previous(False)
    workflow = builder.build()
    linked = link(workflow, listener=chats.chat.events.append)
    result = await workflow.run("Find a hut.")
    (request,) = result.get_request_info_events()
    reply = HandoffAgentUserRequest.create_response("The first.")
    await workflow.run(responses={request.request_id: reply})
    await linked.close()
    assert "".join(chats.chat.asked) == ("ab" + "bcabc" if returns else "ab" + "abcabc")
    first = [None, "hit", None]
    assert chats.chat.statuses == [*first, *["hit"] * (len(chats.chat.asked) - 3)]
    assert "mispredicted" not in chats.chat.statuses


async def test_conditions_of_the_users_run_as_often_as_without_links(chats: ChatRunner) -> None:
    ran: Counter[str] = Counter()

    def ends(messages: Sequence[Message]) -> bool:
        ran["condition"] += 1
        return is_done(messages)

    await handoff(chats.client(hand_on(4)), ends=ends).run("Find a hut.")
    unlinked, _ = ran.copy(), ran.clear()
    chat = await chats.run(handoff(chats.client(hand_on(4)), ends=ends))
    assert ran == unlinked and chat.statuses == [None, *["hit"] * 3]


async def test_agents_with_history_providers_are_linked(chats: ChatRunner) -> None:
    """The framework then gives them a context provider of its own instead of a middleware."""
    client = chats.client(hand_on(5))
    members = [
        member(client, name, context_providers=[InMemoryHistoryProvider()]) for name in NAMES
    ]
    builder = HandoffBuilder(participants=members, termination_condition=is_done)
    chat = await chats.run(builder.with_start_agent(members[0]).build())
    assert chat.verdicts == ["none", *["exact"] * 4]
    assert chat.statuses == [None, *["hit"] * 4]


class Adds(ChatMiddleware):
    async def process(self, context: ChatContext, call_next: Any) -> None:
        context.messages = [*context.messages, Message("user", ["Be brief."])]
        await call_next()


async def test_middleware_of_the_users_is_refused_in_words(chats: ChatRunner) -> None:
    client = chats.client(hand_on(4))
    members = [member(client, n, middleware=[Adds()] if n == "b" else None) for n in NAMES]
    builder = HandoffBuilder(participants=members, termination_condition=is_done)
    chat = await chats.run(builder.with_start_agent(members[0]).build())
    assert chat.declined == {"b": "it has middleware"}
    # The request after b's answer is unknown.
    assert chat.asked == [*"abca"] and chat.statuses == [None, None, None, "hit"]
