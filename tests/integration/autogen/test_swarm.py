"""Swarms: agents that may be handed off to are linked, and no handoff's message is guessed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import pytest
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import Swarm
from autogen_core.models import UserMessage

from flashmoa.autogen import link, watch
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkDeclined, LinkOpened
from tests.integration.autogen.exactness import (
    CallOutcome,
    count_outcomes,
    finished_calls,
    mostly_hit,
)
from tests.integration.autogen.teams import Client, agent
from tests.integration.scripted import script
from tests.integration.support import LAG, slow, wait_until_idle

pytestmark = pytest.mark.anyio


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=40,
        extra_body={"ignore_eos": True},
    )
    await client.engine.flush_cache()
    yield client
    await wait_until_idle(client.engine)
    await client.close()


async def run(build: Callable[[], Swarm], task: str) -> tuple[list[CallOutcome], list[Event]]:
    """Run a team linked and unlinked, and compare the messages."""
    events: list[Event] = []
    team = build()
    linked = link(team, listener=events.append)
    messages = _messages(await team.run(task=task))
    await linked.close()
    plain = build()
    watch(plain, lambda _: None)
    assert _messages(await plain.run(task=task)) == messages
    return finished_calls(events), events


def _messages(result: TaskResult) -> list[tuple[str, str]]:
    return [(message.source, message.to_text()) for message in result.messages]


def speaker(request: dict[str, Any]) -> str:
    return str(request["messages"][0]["content"]).split()[2].rstrip(".")


async def test_handoff_targets_are_linked_up_to_the_handoff(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_to(request: dict[str, Any]) -> Any:
        return (f"transfer_to_{'bob' if speaker(request) == 'alice' else 'alice'}", {})

    script(monkeypatch, answer_to)

    def team() -> Swarm:
        agents = [
            agent(model_client, "alice", handoffs=["bob"]),
            agent(model_client, "bob", handoffs=["alice"]),
        ]
        return Swarm(agents, termination_condition=MaxMessageTermination(10))

    calls, _ = await run(team, guide[:900])
    assert [call.agent for call in calls] == ["alice", "bob"] * 4 + ["alice"]
    count_outcomes("swarm", calls[1:])
    assert {call.status for call in calls[1:]} <= {"hit", "late"} and mostly_hit(calls[1:])
    message = UserMessage(
        content="Transferred to alice, adopting the role of alice immediately.", source="bob"
    )
    # All before the handoff's message was prefilled, except for the template's tokens around it and
    # those that are too few for a forward. The first target's prompt, no part of
    # which is cached, may be left, because streams on a CPU may wait for the end of decodes.
    left = 16 + LAG + await anyio.to_thread.run_sync(model_client.count_tokens, [message])
    late = [call.late_tokens for call in calls[2:] if call.status == "hit"]
    assert [tokens for tokens in late if tokens is None or tokens > left] == [], (late, left)


@pytest.mark.slow
async def test_a_target_is_linked_when_a_later_speaker_can_hand_off_to_it(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(["analyst", "writer"] * 3)

    def answer_to(request: dict[str, Any]) -> Any:
        name = next(turns, "writer") if speaker(request) == "planner" else "planner"
        return (f"transfer_to_{name}", {})

    script(monkeypatch, answer_to)

    def team() -> Swarm:
        nonlocal turns
        turns = iter(["analyst", "writer"] * 3)
        agents = [
            agent(model_client, "planner", handoffs=["analyst", "writer"]),
            agent(model_client, "analyst", handoffs=["planner"]),
            agent(model_client, "writer", handoffs=["planner"]),
        ]
        return Swarm(agents, termination_condition=MaxMessageTermination(10))

    calls, events = await run(team, guide[:900])
    assert {call.agent for call in calls} == {"planner", "analyst", "writer"}
    count_outcomes("swarm of three", calls[1:])
    assert {call.status for call in calls[1:]} <= {"hit", "late"} and mostly_hit(calls[1:])
    assert not [event for event in events if isinstance(event, LinkDeclined)]
    # An agent is not linked while the speaker cannot hand off to it.
    opened = [event.agent for event in events if isinstance(event, LinkOpened)]
    assert opened[:2] == ["analyst", "writer"]


@pytest.mark.parametrize("extra", ["I hand this over.", slow(("look", {"place": "lake"}))])
async def test_messages_next_to_a_handoff_are_not_mispredicted(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, extra: Any
) -> None:
    def answer_to(request: dict[str, Any]) -> Any:
        return [extra, (f"transfer_to_{'bob' if speaker(request) == 'alice' else 'alice'}", {})]

    script(monkeypatch, answer_to)

    async def look(place: str) -> str:
        """Look at a place."""
        return f"a fine {place}"

    def team() -> Swarm:
        agents = [
            agent(model_client, "alice", handoffs=["bob"], tools=[look]),
            agent(model_client, "bob", handoffs=["alice"], tools=[look]),
        ]
        return Swarm(agents, termination_condition=MaxMessageTermination(9))

    calls, events = await run(team, guide[:900])
    assert len(calls) > 3
    # Who hands off does not ask again, whatever other tools it calls.
    upstream = [event.upstream for event in events if isinstance(event, LinkOpened)]
    assert not any("()" in name for names in upstream for name in names)
    count_outcomes("swarm, more beside the handoff", calls[1:])
    assert {call.status for call in calls[1:]} <= {"hit", "late"} and mostly_hit(calls[1:])
