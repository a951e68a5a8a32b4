"""Test the links of Magentic chats, whose manager plans, chooses and instructs; no engine."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from agent_framework import Message, Workflow
from agent_framework.orchestrations import (
    MagenticBuilder,
    MagenticContext,
    MagenticManagerBase,
    MagenticOrchestrator,
    MagenticProgressLedger,
    StandardMagenticManager,
)

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.observe import LinkWaits
from flashmoa.observe.events import FIRST
from tests.unit.frameworks.agent_framework.fakes import agent, call_tool
from tests.unit.frameworks.agent_framework.forecasts import ChatRunner, Script, prose
from tests.unit.frameworks.agent_framework.test_group_chats import NAMES, look

MANAGER = "magentic_orchestrator"
BOSS = "magentic manager"


def magentic(client: FlashMoAChatClient, *, tools: bool = False, **more: Any) -> Workflow:
    members = [agent(client, n, tools=[look] if tools and n == "b" else None) for n in NAMES]
    if "manager" not in more:
        more |= {"manager_agent": agent(client, BOSS), "max_round_count": 12, **more}
    return MagenticBuilder(participants=members, **more).build()


def ledger(speaker: str | None, *, stalled: bool = False) -> str:
    def answer(value: object) -> dict[str, object]:
        return {"reason": "so", "answer": value}

    return json.dumps(
        {
            "is_request_satisfied": answer(speaker is None),
            "is_in_loop": answer(stalled),
            "is_progress_being_made": answer(not stalled),
            "next_speaker": answer(speaker or "a"),
            "instruction_or_question": answer(f"Go on, {speaker}."),
        }
    )


def ledgers(order: str) -> Script:
    """Return a script: the manager chooses the agents in this order; ``!`` is a stall."""
    chosen: Iterator[str] = iter(order)

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        if name != BOSS or "pure JSON" not in body["messages"][-1]["content"]:
            return prose(name, number, body)
        speaker = next(chosen, None)
        return ledger("a", stalled=True) if speaker == "!" else ledger(speaker)

    return write


def with_instructions(chats: ChatRunner, script: Script) -> Script:
    """Note the instructions, which the forecasts' placeholders of the manager stand for."""

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        answer = script(name, number, body)
        if name == BOSS and "pure JSON" in body["messages"][-1]["content"]:
            said = json.loads(answer)["instruction_or_question"]["answer"]
            chats.chat.texts[MANAGER] = said
        return answer

    return write


def short(asked: list[str]) -> str:
    return "".join(asked).replace(BOSS, ".")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_manager_and_those_whom_it_instructs_were_forecast(
    chats: ChatRunner, stream: bool
) -> None:
    """Facts, plan and final answer are the manager's own next calls, which are not linked."""
    client = chats.client(with_instructions(chats, ledgers("abca")))
    chat = await chats.run(magentic(client), stream=stream)
    assert short(chat.asked) == "...a.b.c.a.."
    others = [*["none"] * 3, *["exact"] * 8, "none"]
    assert chat.verdicts == others
    assert chat.statuses == ["hit" if verdict == "exact" else None for verdict in others]
    assert chat.calls[1].started.unlinked.startswith("it spoke again")
    # The instruction is cut out of JSON.
    assert {each.upstream for each in chat.events if isinstance(each, LinkWaits)} == {MANAGER}


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_results_of_tools_are_read_by_others(
    chats: ChatRunner, stream: bool
) -> None:
    """Unlike in a group chat. Of the answer that goes on after tools, others get nothing before."""

    def write(name: str, number: int, body: Mapping[str, Any]) -> Any:
        if name == "b" and body["messages"][-1]["role"] != "tool":
            return "Let me look.", call_tool("look", what="hut")
        return decide(name, number, body)

    decide = with_instructions(chats, ledgers("abc"))
    chat = await chats.run(magentic(chats.client(write), tools=True), stream=stream)
    assert short(chat.asked) == "...a.bb.c.."
    assert chat.statuses == [*[None] * 3, "hit", "hit", "hit", None, "hit", "hit", "hit", None]
    assert chat.fake is not None
    reader = chat.fake.sent[8]
    assert "42" in reader.prompt and reader.streamed is not None
    assert reader.streamed in reader.prompt and "Let me look" not in reader.streamed


async def test_a_reset_drops_the_links(chats: ChatRunner) -> None:
    """It replaces the agents' histories. The requests after it are forecast anew."""
    script = with_instructions(chats, ledgers("ab!cab"))
    chat = await chats.run(magentic(chats.client(script), max_stall_count=0))
    assert short(chat.asked) == "...a.b...." + "c.a.b.."
    again = chat.asked.index("c")
    assert chat.statuses[again:] == [*["hit"] * 6, None]
    assert chat.verdicts[again:] == [*["exact"] * 6, "none"]
    assert "mispredicted" not in chat.statuses
    assert chat.fake is not None and "Find a hut" not in chat.fake.sent[again].prompt


async def test_nothing_is_linked_after_the_last_round(
    chats: ChatRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """A forecast would log that the limit is reached."""
    client = chats.client(with_instructions(chats, ledgers("abc")))
    chat = await chats.run(magentic(client, max_round_count=2))
    assert short(chat.asked) == "...a.b"
    assert chat.statuses == [*[None] * 3, "hit", "hit", "hit"]
    assert len([each for each in caplog.messages if "Max round count" in each]) == 1


class Thrifty(MagenticManagerBase):
    """A manager of the user's own, which asks no model."""

    asked = 0
    order = "ab"

    async def plan(self, magentic_context: MagenticContext) -> Message:
        Thrifty.asked += 1
        return Message("assistant", ["Do it."], author_name="magentic_manager")

    replan = plan

    async def create_progress_ledger(
        self, magentic_context: MagenticContext
    ) -> MagenticProgressLedger:
        Thrifty.asked += 1
        speaker, Thrifty.order = Thrifty.order[:1], Thrifty.order[1:]
        return MagenticProgressLedger.from_dict(json.loads(ledger(speaker or None)))

    async def prepare_final_answer(self, magentic_context: MagenticContext) -> Message:
        return Message("assistant", ["Done."])


async def test_a_manager_of_ones_own_is_not_run_ahead(chats: ChatRunner) -> None:
    """The agents are linked: a stand-in for the manager chooses them."""
    chat = await chats.run(magentic(chats.client(), manager=Thrifty()))
    assert Thrifty.asked == 4 and chat.asked == [*"ab"]
    assert chat.statuses == [None, "hit"]


class Terse(StandardMagenticManager): ...


class Other(MagenticOrchestrator): ...


async def test_managers_of_ones_own_class_are_refused_in_words(chats: ChatRunner) -> None:
    client = chats.client(with_instructions(chats, ledgers("ab")))
    chat = await chats.run(magentic(client, manager=Terse(agent(client, BOSS))))
    assert chat.declined[MANAGER] == "its manager is a Terse, not a StandardMagenticManager"
    assert short(chat.asked) == "...a.b.."
    assert chat.statuses == [*[None] * 3, "hit", None, "hit", None, None]


async def test_orchestrators_of_ones_own_class_are_refused_in_words(chats: ChatRunner) -> None:
    workflow = magentic(chats.client(ledgers("ab")))
    workflow.get_start_executor().__class__ = Other  # type: ignore[assignment]
    chat = await chats.run(workflow)
    reason = "its workflow's Other has rules that are not Agent Framework's own"
    assert [call.started.unlinked for call in chat.calls] == [FIRST, *[reason] * 7]


async def test_a_review_of_the_plan_loses_nothing(chats: ChatRunner) -> None:
    """The run ends with the request for the review, and another one begins with the reply."""
    client = chats.client(with_instructions(chats, ledgers("ab")))
    workflow = magentic(client, enable_plan_review=True)
    linked = link(workflow, listener=chats.chat.events.append)
    result = await workflow.run("Find a hut.")
    (request,) = result.get_request_info_events()
    result = await workflow.run(responses={request.request_id: request.data.approve()})
    await linked.close()
    assert short(chats.chat.asked) == "...a.b.."
    assert chats.chat.statuses == [*[None] * 3, *["hit"] * 4, None]
    assert len(result.get_outputs()) == 1
