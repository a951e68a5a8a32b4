"""Test chats with checkpoints, approvals and workflows of their own: linking loses nothing."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from agent_framework import (
    CheckpointStorage,
    InMemoryCheckpointStorage,
    Workflow,
    WorkflowRunResult,
)
from agent_framework.orchestrations import AgentRequestInfoResponse, SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from tests.unit.frameworks.agent_framework.fakes import agent
from tests.unit.frameworks.agent_framework.forecasts import ChatRunner, Script
from tests.unit.frameworks.agent_framework.test_group_chats import (
    NAMES,
    by_function,
    by_manager,
    decisions,
    group_chat,
)
from tests.unit.frameworks.agent_framework.test_handoffs import hand_on, handoff
from tests.unit.frameworks.agent_framework.test_magentic import (
    ledgers,
    magentic,
    with_instructions,
)

# Random ids, numbers of tool calls, and times.
_RANDOM = re.compile(
    r"af-[\w-]+|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|call-\d+"
    r"|\d{4}-\d\d-\d\dT[\d:.+]+"
)


def function_chat(client: FlashMoAChatClient, storage: CheckpointStorage | None) -> Workflow:
    return by_function(client, checkpoint_storage=storage)


def manager_chat(client: FlashMoAChatClient, storage: CheckpointStorage | None) -> Workflow:
    return by_manager(client, checkpoint_storage=storage)


def magentic_chat(client: FlashMoAChatClient, storage: CheckpointStorage | None) -> Workflow:
    return magentic(client, checkpoint_storage=storage)


def handoff_chat(client: FlashMoAChatClient, storage: CheckpointStorage | None) -> Workflow:
    return handoff(client, storage=storage)


def hand_on_six_times(_: str) -> Script:
    return hand_on(6)


def described(thing: Any) -> str:
    """Describe messages, outputs or checkpoints without their random parts."""

    def describe(one: Any) -> Any:
        if is_dataclass(one) and not isinstance(one, type):
            held = {each.name: getattr(one, each.name) for each in fields(one)}
        else:
            held = getattr(one, "__dict__", repr(one))
        return [type(one).__name__, held]

    return _RANDOM.sub("(random)", json.dumps(thing, default=describe, indent=1))


async def checkpoints_of(storage: CheckpointStorage, workflow: Workflow) -> list[Any]:
    found = await storage.list_checkpoints(workflow_name=workflow.name)
    return sorted(found, key=lambda each: (each.timestamp, each.iteration_count))


@pytest.mark.parametrize(
    ("build", "script", "middle"),
    [
        (function_chat, decisions, 5),
        (manager_chat, decisions, 5),
        (magentic_chat, ledgers, 5),
        (handoff_chat, hand_on_six_times, 3),
    ],
)
async def test_checkpoints_are_the_same_with_links(
    monkeypatch: pytest.MonkeyPatch, build: Any, script: Callable[[str], Script], middle: int
) -> None:
    """Also when a chat goes on from a checkpoint in the middle, as after the process's end."""
    found: dict[bool, list[str]] = {}
    for is_linked in (False, True):
        chats, storage = ChatRunner(monkeypatch), InMemoryCheckpointStorage()
        first, second = (script(order) for order in ("abcabca", "bcabca"))
        workflow = build(chats.client(with_instructions(chats, first)), storage)
        resumed = build(chats.client(with_instructions(chats, second)), storage)
        links = [link(each) for each in (workflow, resumed)] if is_linked else []
        whole = await workflow.run("Find a hut.")
        saved = await checkpoints_of(storage, workflow)
        rest = await resumed.run(checkpoint_id=saved[middle].checkpoint_id)
        later = (await checkpoints_of(storage, workflow))[len(saved) :]
        assert len(saved) > 5 and len(later) > 3
        found[is_linked] = [described(each) for each in (whole.get_outputs(), rest.get_outputs())]
        found[is_linked] += [described(each) for each in (saved, later)]
        if is_linked:  # All but the first calls; Magentic's manager also plans and sums up.
            unlinked = 6 if build is magentic_chat else 2
            assert chats.chat.verdicts.count("exact") == len(chats.chat.verdicts) - unlinked
        for each in links:
            await each.close()
        monkeypatch.undo()
    assert found[True] == found[False]


async def test_agents_that_ask_for_approval_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a workflow of its own. The others are linked, and nothing is lost."""
    found: dict[bool, list[str]] = {}
    for is_linked in (False, True):
        chats = ChatRunner(monkeypatch)
        client = chats.client()
        workflow = group_chat(client, rounds=6).with_request_info(agents=["b"]).build()
        linked = link(workflow, listener=chats.chat.events.append) if is_linked else None
        result: WorkflowRunResult = await workflow.run("Find a hut.")
        outputs = result.get_outputs()
        while requests := result.get_request_info_events():
            approved = {each.request_id: AgentRequestInfoResponse.approve() for each in requests}
            result = await workflow.run(responses=approved)
            outputs += result.get_outputs()
        found[is_linked] = [described([outputs, chats.chat.asked])]
        if linked is not None:
            await linked.close()
            assert "it runs a workflow" in chats.chat.declined["b"]
            assert chats.chat.asked == [*"abcabc"]
            # A run ends with each request. Then c begins, and after it a is linked.
            assert chats.chat.statuses == [None, None, None, "hit", None, None]
        monkeypatch.undo()
    assert found[True] == found[False]


async def test_a_workflow_in_a_chat_is_linked_by_itself(chats: ChatRunner) -> None:
    client = chats.client()
    pair = SequentialBuilder(participants=[agent(client, name) for name in ("i", "j")]).build()
    members = [agent(client, "a"), pair.as_agent(name="b"), agent(client, "c")]
    inner = link(pair)
    chat = await chats.run(group_chat(client, members, rounds=5).build())
    await inner.close()
    assert chat.asked == [*"aijcaij"] and NAMES == ["a", "b", "c"]
    assert chat.statuses == [None, None, "hit", None, "hit", None, "hit"]
    assert "it runs a workflow" in chat.declined["b"]
