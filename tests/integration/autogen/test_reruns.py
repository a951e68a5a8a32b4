"""Test teams that run again, are reset, or stop: no link outlives the run that it was made for."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import pytest
from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    DiGraphBuilder,
    GraphFlow,
    RoundRobinGroupChat,
    SelectorGroupChat,
)

from flashmoa.autogen import link, watch
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFinished, Event, LinkClosed, LinkDeclined, LinkOpened
from tests.integration.autogen.exactness import count_outcomes, finished_calls
from tests.integration.autogen.teams import Build, Client, agent
from tests.integration.support import LAG, slow_except, wait_until_idle
from tests.unit.autogen.test_overriding import FixedSpeaker, NumberedMessage

pytestmark = pytest.mark.anyio


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=30,
        extra_body={"ignore_eos": True},
    )
    await client.engine.flush_cache()
    yield client
    await wait_until_idle(client.engine)
    await client.close()


async def until(holds: Callable[[], object]) -> None:
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def events_of(events: list[Event], kind: type[Event], name: str) -> list[Any]:
    return [event for event in events if isinstance(event, kind) and event.agent == name]


def stopped(client: Client) -> BaseGroupChat:
    """Make an inner team that is stopped by its condition, which cannot be known beforehand."""
    stop = MaxMessageTermination(3)
    inner = RoundRobinGroupChat(
        [agent(client, n) for n in ("in1", "in2", "in3")], termination_condition=stop
    )
    return RoundRobinGroupChat([agent(client, "one"), inner], max_turns=8)


def stopped_society(client: Client) -> BaseGroupChat:
    stop = MaxMessageTermination(3)
    inner = RoundRobinGroupChat(
        [agent(client, n) for n in ("in1", "in2", "in3")], termination_condition=stop
    )
    minds = SocietyOfMindAgent("minds", team=inner, model_client=client)
    return RoundRobinGroupChat([agent(client, "one"), minds], max_turns=6)


def stopped_selector(client: Client) -> BaseGroupChat:
    inner = SelectorGroupChat(
        [agent(client, n) for n in ("in1", "in2")],
        model_client=client,
        termination_condition=MaxMessageTermination(3),
        max_selector_attempts=1,
        allow_repeated_speaker=True,
    )
    return RoundRobinGroupChat([agent(client, "one"), inner], max_turns=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    slow_except([stopped, stopped_society, stopped_selector], stopped),
    ids=lambda build: build.__name__,
)
async def test_links_of_an_inner_team_that_was_stopped_are_not_used_by_its_next_run(
    model_client: Client, guide: str, build: Build
) -> None:
    events: list[Event] = []
    team = build(model_client)
    linked = link(team, listener=events.append)
    result = await team.run(task=guide[:600])
    await linked.close()
    plain = build(model_client)
    watch(plain, lambda _: None)
    unlinked = await plain.run(task=guide[:600])
    assert [m.to_text() for m in result.messages] == [m.to_text() for m in unlinked.messages]  # type: ignore[union-attr]
    calls = finished_calls(events)
    count_outcomes(build.__name__, calls)
    assert {call.status for call in calls} <= {None, "hit", "late"}
    assert "hit" in {call.status for call in calls}
    assert not [event for event in events if isinstance(event, LinkDeclined)]


@pytest.mark.parametrize("resets", [False, True])
async def test_links_of_a_run_that_was_stopped_are_not_used_by_the_next_one(
    model_client: Client, guide: str, resets: bool
) -> None:
    """The next run follows at once, before FlashMoA has noticed the end of the one before."""
    members = [agent(model_client, name) for name in ("one", "two", "three")]
    team = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3))
    events: list[Event] = []
    linked = link(team, listener=events.append)
    for task in (guide[:600], "And now?", "And then?"):
        await team.run(task=task)
        if resets:
            await team.reset()
    await linked.close()
    calls = finished_calls(events)
    count_outcomes("stopped, and run again at once", calls)
    assert {call.status for call in calls} <= {None, "hit", "late"}
    assert "hit" in {call.status for call in calls}


@pytest.mark.parametrize("between", ["nothing", "a reset", "another task"])
async def test_the_known_part_of_the_next_runs_first_prompt_is_prefilled(
    model_client: Client, guide: str, between: str
) -> None:
    members = [agent(model_client, name) for name in ("one", "two", "three")]
    team = RoundRobinGroupChat(members, max_turns=3)
    events: list[Event] = []
    linked = link(team, listener=events.append)
    await team.run(task=guide[:600])
    await until(lambda: events_of(events, LinkOpened, "one"))
    if between == "a reset":
        await team.reset()
    await team.run(
        task="And now?" if between != "another task" else TextMessage(content="And?", source="two")
    )
    await linked.close()
    first = [call for call in finished_calls(events) if call.agent == "one"]
    assert len(first) == 2
    if between == "a reset":
        assert first[1].status is None
        assert events_of(events, LinkClosed, "one")[0].reason in {"mispredicted", "unused"}
    else:
        assert first[1].status == "hit"
        # The others' messages were prefilled, nearly; the task and the template's ends are left.
        assert first[1].late_tokens is not None and first[1].late_tokens < 60 + LAG
    assert {call.status for call in finished_calls(events)} <= {None, "hit", "late"}


async def test_links_for_a_next_run_end_if_it_does_not_come(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmoa.autogen._team_link._NEXT_RUN_SECONDS", 0.5)
    team = RoundRobinGroupChat([agent(model_client, n) for n in ("one", "two")], max_turns=2)
    events: list[Event] = []
    linked = link(team, listener=events.append)
    await team.run(task=guide[:600])
    await until(lambda: events_of(events, LinkClosed, "one"))
    assert [event.reason for event in events_of(events, LinkClosed, "one")] == ["unused"]
    await wait_until_idle(model_client.engine)
    await linked.close()


async def test_all_first_agents_of_the_next_run_are_linked(
    model_client: Client, guide: str
) -> None:
    a, b, c = (agent(model_client, name) for name in "abc")
    builder = DiGraphBuilder()
    for one in (a, b, c):
        builder.add_node(one)
    builder.add_edge(a, c).add_edge(b, c)
    team = GraphFlow([a, b, c], graph=builder.build())
    events: list[Event] = []
    linked = link(team, listener=events.append)
    await team.run(task=guide[:600])
    await until(lambda: events_of(events, LinkOpened, "a") and events_of(events, LinkOpened, "b"))
    await team.run(task="And now?")
    await linked.close()
    calls = finished_calls(events)
    assert [call.status for call in calls if call.agent in "ab"][2:] == ["hit", "hit"]
    assert {call.status for call in calls} <= {None, "hit", "late"}


async def test_a_declined_agent_is_linked_when_the_reason_no_longer_holds(
    model_client: Client, guide: str
) -> None:
    """A message of a user-defined class is not turned into text; the next one is a stock one."""
    numbers = itertools.count(1)

    class OnlyFirst(FixedSpeaker):
        async def on_messages(self, messages: Any, cancellation_token: Any) -> Any:
            response = await super().on_messages(messages, cancellation_token)
            if self.has_spoken:
                text = response.chat_message.to_text()
                response.chat_message = TextMessage(content=text, source=self.name)
            self.has_spoken = True
            return response

        has_spoken = False

    members = [
        agent(model_client, "one"),
        OnlyFirst("two", lambda: next(numbers)),
        agent(model_client, "three"),
        agent(model_client, "four"),
    ]
    team = RoundRobinGroupChat(members, max_turns=8, custom_message_types=[NumberedMessage])
    events: list[Event] = []
    linked = link(team, listener=events.append)
    await team.run(task=guide[:600])
    await linked.close()
    calls = finished_calls(events)
    four = [call.status for call in calls if call.agent == "four"]
    assert events_of(events, LinkDeclined, "four")
    assert four[1] == "hit"
    assert len(events_of(events, CallFinished, "four")) == 2
    assert {call.status for call in calls} <= {None, "hit", "late"}


# OpenAI's client leaves its connections to loops that have ended to Python, which warns of them.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_teams_of_one_client_are_linked_in_one_event_loop_after_the_other(
    engine: LocalEngine, guide: str
) -> None:
    """As in a program that calls ``asyncio.run`` for each of its teams."""
    settings: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    client = Client(model="tiny", base_url=engine.url, max_tokens=100, **settings)

    async def main() -> list[Event]:
        events: list[Event] = []
        members = [agent(client, "one"), agent(client, "two", system_message=guide[:3000])]
        team = RoundRobinGroupChat(members, max_turns=2)
        linked = link(team, listener=events.append)
        await client.engine.flush_cache()
        await team.run(task="Go.")
        await linked.close()
        await wait_until_idle(client.engine)
        return events

    for _ in range(3):
        events = await anyio.to_thread.run_sync(lambda: asyncio.run(main()))
        statuses = [(call.agent, call.status) for call in finished_calls(events)]
        assert statuses == [("one", None), ("two", "hit")]
    await anyio.to_thread.run_sync(lambda: asyncio.run(client.close()))
    gc.collect()
