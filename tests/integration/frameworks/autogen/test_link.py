"""Test ``link(team)`` on real engines: same answers, and B's prompt computed while A writes."""

import logging

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkAdvanced, LinkClosed, LinkOpened
from tests.integration.frameworks.autogen.runs import (
    MODES,
    Client,
    connected,
    finished_calls,
    make,
    run_once,
)
from tests.integration.frameworks.autogen.teams import agent


def chain(clients: tuple[Client, Client], guide: str, turns: int = 4) -> RoundRobinGroupChat:
    """Make a team of three agents on the first engine and one on the second (examples/chain.py)."""
    agents = [
        agent(clients[name == "summary"], name, system_message=f"{guide[:3000]}\n\nYou are {name}.")
        for name in ("planner", "local", "language", "summary")
    ]
    return RoundRobinGroupChat(agents, max_turns=turns)


async def test_a_summary_on_another_engine_is_prefilled_while_the_others_write(
    engine: LocalEngine, downstream: LocalEngine, guide: str
) -> None:
    """Watching links nothing, and warming sends no text of agents that are writing."""
    async with connected(engine, downstream, max_tokens=12) as (first, second):
        pair = first, second
        unlinked, warmed, linked = [
            await run_once(lambda: chain(pair, guide, 10), pair, "Go.", mode) for mode in MODES
        ]
    assert unlinked.messages == warmed.messages == linked.messages
    assert len(unlinked.calls) == len(linked.calls) == 10
    assert not unlinked.events_of(LinkOpened)
    # At least the two upstream texts are missing.
    assert all(call.late_tokens > 24 for call in warmed.calls[2:4])
    assert [call.status for call in linked.calls] == [None] + ["hit"] * 9
    usage = linked.calls[3].usage
    assert usage is not None and usage.prompt_stream is not None
    assert usage.streamed_tokens is not None and usage.streamed_tokens > 500
    assert min(span.start for span in usage.prompt_stream.prefills) < linked.calls[0].at
    assert {event.agent: event.upstream for event in linked.events_of(LinkOpened)[:3]} == {
        "local": ("planner",),
        "language": ("planner", "local"),
        "summary": ("planner", "local", "language"),
    }
    assert {event.reason for event in linked.events_of(LinkClosed)} == {"used"}


async def test_prompts_on_a_plain_server_are_prefilled_with_one_warning(
    engine: LocalEngine,
    plain_engine: LocalEngine,
    guide: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashmoa.link.prompt_feed._logged", set())
    clients = make(engine, max_tokens=200), make(plain_engine, max_tokens=12)

    def build() -> RoundRobinGroupChat:
        writer = agent(clients[0], "writer")
        reader = agent(clients[1], "reader", system_message=guide[:6000])
        return RoundRobinGroupChat([writer, reader], max_turns=2)

    with caplog.at_level(logging.WARNING, "flashmoa"):
        unlinked = await run_once(build, clients, "Go.", "unlinked")
        linked = [await run_once(build, clients, "Go.") for _ in range(2)]
    for client in clients:
        await client.close()
    for run in linked:
        assert run.messages == unlinked.messages
        before, after = unlinked.calls[-1].usage, run.calls[-1].usage
        assert before is not None and after is not None
        assert before.prompt_tokens == after.prompt_tokens
        assert (before.cached_tokens or 0) < 10
        advanced = run.events_of(LinkAdvanced, "reader")[-1]
        assert 1000 < advanced.prefilled_tokens - 8 <= (after.cached_tokens or 0)
    assert len([one for one in caplog.messages if "without the flashmoa-sglang" in one]) == 1


async def test_auto_link_links_a_team_without_a_call_of_link(
    engine: LocalEngine, guide: str
) -> None:
    events: list[Event] = []
    async with connected(engine, auto_link=True, listener=events.append) as (client,):
        assert client.dump_component().config["auto_link"] is True
        team = RoundRobinGroupChat([agent(client, n) for n in ("one", "two", "three")], max_turns=4)
        await team.run(task=guide[:600])
        # Each call is reported once. How much the engine has computed ahead depends on its costs.
        finished = [(call.agent, call.status) for call in finished_calls(events)]
        assert finished == [("one", None), ("two", "hit"), ("three", "hit"), ("one", "hit")]
        alone = await AssistantAgent("alone", model_client=client).run(task="Go.")
        assert len(alone.messages) == 2
