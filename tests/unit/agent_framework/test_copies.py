"""Test that dry runs of included executors change nothing that the real run uses; no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from agent_framework import (
    AgentExecutor,
    AgentResponse,
    BaseAgent,
    ContextProvider,
    Message,
    Workflow,
)

from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.agent_framework._copies import copy_included
from tests.unit.agent_framework.fakes import agent, chain, make_client, run_linked

pytestmark = pytest.mark.anyio


class Remembers(ContextProvider):
    """Keeps what it has seen in the session's state, in a list in a list."""

    def __init__(self) -> None:
        super().__init__("remembers")

    async def before_run(self, *, context: Any, state: Any, **_: Any) -> None:
        (seen,) = state.setdefault("seen", [[]])
        seen.append(context.input_messages[-1].text)
        context.extend_instructions(self.source_id, f"Seen: {'|'.join(seen)}")


@dataclass
class Notes:
    texts: dict[str, list[str]] = field(default_factory=lambda: {"seen": []})


class Custom(BaseAgent):
    """An agent that keeps its own history, and notes in a record of its own."""

    def __init__(self, client: FlashMoAChatClient) -> None:
        super().__init__(name="b")
        self.client = client
        self.history: list[Message] = []
        self.notes = Notes()

    async def run(self, messages: Any = None, **_: Any) -> AgentResponse:
        self.history.extend(messages)
        self.notes.texts["seen"].append(messages[-1].text)
        noted = Message("system", [f"Noted: {self.notes.texts['seen']}"])
        response = await self.client.get_response([noted, *self.history])
        self.history.extend(response.messages)
        return AgentResponse(messages=response.messages)


def mark(messages: list[Message]) -> list[Message]:
    for content in messages[0].contents:
        content.text = f"{content.text} (reviewed)"
    return messages


def filtered(client: FlashMoAChatClient) -> Any:
    return AgentExecutor(agent(client, "b"), context_mode="custom", context_filter=mark)


def remembering(client: FlashMoAChatClient) -> Any:
    return agent(client, "b", context_providers=[Remembers()])


@pytest.mark.parametrize("make", [Custom, filtered, remembering])
async def test_a_dry_run_of_an_included_executor_changes_no_prompt(
    make: Callable[[FlashMoAChatClient], Any],
) -> None:
    client, fake = make_client()

    def build() -> Workflow:
        return chain(client, make(client))

    plain = build()
    for _ in range(2):
        await plain.run("task")
    unlinked = [sent.prompt for sent in fake.sent]
    fake.sent.clear()
    assert await run_linked(build(), "b", runs=2) == []
    assert [sent.prompt for sent in fake.sent] == unlinked
    assert [sent.status for sent in fake.sent] == [None, "hit"] * 2


async def test_a_session_that_cannot_be_copied_is_declined() -> None:
    client, fake = make_client()
    workflow = chain(client)
    executor: Any = workflow.executors["b"]
    executor._session.state["lock"] = threading.Lock()
    (reason,) = await run_linked(workflow, "b")
    assert "cannot be copied" in reason and "lock" in reason
    assert [sent.status for sent in fake.sent] == [None, None]


def test_raw_representations_are_shared_and_references_are_kept() -> None:
    client, _ = make_client()
    custom, raw = Custom(client), threading.Lock()
    message = Message("user", ["hello"], raw_representation=raw)
    custom.history.append(message)
    executor = AgentExecutor(custom)
    executor._cache.append(message)
    shadow, given = copy_included(executor, [message])
    assert isinstance(shadow, AgentExecutor) and isinstance(shadow.agent, Custom)
    assert shadow.agent is not custom and shadow.agent.client is client
    assert shadow._cache[0] is shadow.agent.history[0] is given[0] is not message
    assert given[0].raw_representation is raw
    assert given[0].contents[0] is not message.contents[0]
