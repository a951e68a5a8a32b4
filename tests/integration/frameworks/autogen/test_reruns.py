"""Test teams that run again, are reset, or stop: no link outlives the run that it was made for."""

import asyncio
import gc
import itertools
from functools import partial
from typing import Any

import anyio
import pytest
from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat

from flashmoa.autogen import link
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFinished, Event, LinkClosed, LinkDeclined, LinkOpened
from tests.integration.frameworks.autogen.runs import (
    Client,
    check_never_mispredicted,
    events_of,
    finished_calls,
    make,
    run_both_ways,
    run_once,
    run_team,
)
from tests.integration.frameworks.autogen.teams import agent, agents, graph, selecting
from tests.integration.support import (
    slow,
    wait_until_idle,
)
from tests.unit.frameworks.autogen.test_overriding import FixedSpeaker, NumberedMessage
from tests.waiting import LAG, until


def stopped(client: Client, inner: str) -> BaseGroupChat:
    """Make a team with one that is stopped by its condition, which cannot be known beforehand."""
    if inner == "selector":
        member: Any = selecting(client, "in1 in2", messages=3)
    else:
        stop = MaxMessageTermination(3)
        member = RoundRobinGroupChat(agents(client, "in1 in2 in3"), termination_condition=stop)
    if inner == "society":
        member = SocietyOfMindAgent("minds", team=member, model_client=client)
    return RoundRobinGroupChat([agent(client, "one"), member], max_turns=6)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["round robin", slow("society"), slow("selector")])
async def test_links_of_an_inner_team_that_was_stopped_are_not_used_by_its_next_run(
    model_client: Client, guide: str, inner: str
) -> None:
    run = await run_both_ways(partial(stopped, model_client, inner), [model_client], guide[:600])
    check_never_mispredicted(run.calls)
    assert not run.events_of(LinkDeclined)


@pytest.mark.parametrize("resets", [False, True])
async def test_links_of_a_run_that_was_stopped_are_not_used_by_the_next_one(
    model_client: Client, guide: str, resets: bool
) -> None:
    """The next run follows at once, before FlashMoA has noticed the end of the one before."""
    members = agents(model_client, "one two three")
    team = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3))
    events: list[Event] = []
    linked = link(team, listener=events.append)
    for task in (guide[:600], "And now?", "And then?"):
        await team.run(task=task)
        if resets:
            await team.reset()
    await linked.close()
    check_never_mispredicted(finished_calls(events))


@pytest.mark.parametrize("between", ["nothing", "a reset", "another task"])
async def test_the_known_part_of_the_next_runs_first_prompt_is_prefilled(
    model_client: Client, guide: str, between: str
) -> None:
    team = RoundRobinGroupChat(agents(model_client, "one two three"), max_turns=3)
    events: list[Event] = []
    linked = link(team, listener=events.append)
    for task in (guide[:600], "More."):
        assert not events_of(events, LinkOpened, "one")
        await team.run(task=task)
    await until(lambda: events_of(events, LinkOpened, "one"))
    if between == "a reset":
        await team.reset()
    await team.run(
        task="And now?" if between != "another task" else TextMessage(content="And?", source="two")
    )
    await linked.close()
    *_, first = [call for call in finished_calls(events) if call.agent == "one"]
    if between == "a reset":
        assert first.status is None
        assert events_of(events, LinkClosed, "one")[0].reason in {"mispredicted", "unused"}
    else:
        assert first.status == "hit"
        # The others' messages were prefilled, nearly; the task and the template's ends are left.
        assert first.late_tokens < 60 + LAG
    assert {call.status for call in finished_calls(events)} <= {None, "hit", "late"}


async def test_links_for_a_next_run_end_if_it_does_not_come(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All agents that may be first are linked."""
    monkeypatch.setattr("flashmoa.frameworks.autogen.team_link._NEXT_RUN_SECONDS", 0.5)
    team = graph(agents(model_client, "a b c"), [(0, 2), (1, 2)])
    events: list[Event] = []
    linked = link(team, listener=events.append)
    for task in (guide[:600], "More."):
        await team.run(task=task)
    await until(lambda: all(events_of(events, LinkClosed, name) for name in "ab"))
    assert {e.reason for name in "ab" for e in events_of(events, LinkClosed, name)} == {"unused"}
    await wait_until_idle(model_client.engine)
    await linked.close()


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

    one, three, four = agents(model_client, "one three four")
    members = [one, OnlyFirst("two", lambda: next(numbers)), three, four]
    team = RoundRobinGroupChat(members, max_turns=8, custom_message_types=[NumberedMessage])
    run = await run_team(team, guide[:600])
    assert run.events_of(LinkDeclined, "four")
    assert [call.status for call in run.calls if call.agent == "four"][1] == "hit"
    assert len(run.events_of(CallFinished, "four")) == 2
    check_never_mispredicted(run.calls)


# OpenAI's client leaves its connections to loops that have ended to Python, which warns of them.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_teams_of_one_client_are_linked_in_one_event_loop_after_the_other(
    engine: LocalEngine, guide: str
) -> None:
    """As in a program that calls ``asyncio.run`` for each of its teams."""
    client = make(engine, max_tokens=100)

    async def main() -> list[tuple[str, str | None]]:
        members = [agent(client, "one"), agent(client, "two", system_message=guide[:3000])]
        run = await run_once(lambda: RoundRobinGroupChat(members, max_turns=2), [client], "Go.")
        await wait_until_idle(client.engine)
        return [(call.agent, call.status) for call in run.calls]

    for _ in range(3):
        statuses = await anyio.to_thread.run_sync(lambda: asyncio.run(main()))
        assert statuses == [("one", None), ("two", "hit")]
    await anyio.to_thread.run_sync(lambda: asyncio.run(client.close()))
    gc.collect()
