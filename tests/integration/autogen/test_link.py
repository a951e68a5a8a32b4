"""Test ``link(team)`` on real engines: same answers, and B's prompt computed while A writes."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import anyio
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_ext.models.openai import OpenAIChatCompletionClient

from flashmoa.autogen import FlashMoAChatCompletionClient, link, watch
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import (
    CallFinished,
    Event,
    LinkAdvanced,
    LinkClosed,
    LinkOpened,
    PromptSent,
)
from flashmoa.observe.trace import read
from tests.integration.autogen.runs import Mode, Run, run_once
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient


def make(engine: LocalEngine, tokens: int = 12) -> Client:
    return Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


@pytest.fixture
async def clients(
    engine: LocalEngine, downstream: LocalEngine
) -> AsyncGenerator[tuple[Client, Client]]:
    pair = make(engine), make(downstream)
    yield pair
    for one in pair:
        await one.close()


def chain(clients: tuple[Client, Client], guide: str, turns: int = 4) -> RoundRobinGroupChat:
    """Make a team of three agents on the first engine and one on the second (examples/chain.py)."""
    agents = [
        AssistantAgent(
            name,
            model_client=clients[name == "summary"],
            system_message=f"{guide[:3000]}\n\nYou are {name}.",
        )
        for name in ("planner", "local", "language", "summary")
    ]
    return RoundRobinGroupChat(agents, max_turns=turns)


@pytest.mark.parametrize("turns", [4, 10])
async def test_linked_answers_equal_unlinked_ones(
    clients: tuple[Client, Client], guide: str, turns: int
) -> None:
    runs: dict[Mode, Run] = {}
    modes: tuple[Mode, ...] = ("unlinked", "warmed", "linked")
    for mode in modes:
        runs[mode] = await run_once(lambda: chain(clients, guide, turns), clients, "Go.", mode)
    assert runs["unlinked"].texts == runs["warmed"].texts == runs["linked"].texts
    assert len(runs["linked"].texts) == turns
    for turn in runs["linked"].turns[1:]:
        assert turn.usage is not None and turn.usage.prompt_stream is not None, turn.agent
        assert turn.usage.prompt_stream.status == "hit", turn.agent


async def test_the_summary_was_prefilled_while_the_others_wrote(
    clients: tuple[Client, Client], guide: str
) -> None:
    run = await run_once(lambda: chain(clients, guide), clients, "Go.", "linked")
    summary = run.turns[-1]
    assert summary.usage is not None and summary.usage.prompt_stream is not None
    assert summary.usage.streamed_tokens is not None and summary.usage.streamed_tokens > 500
    spans = summary.usage.prompt_stream.prefills
    assert min(span.start for span in spans) < run.turns[0].last_token
    opened = [event for event in run.events if isinstance(event, LinkOpened)]
    assert {event.agent: event.upstream for event in opened} == {
        "local": ("planner",),
        "language": ("planner", "local"),
        "summary": ("planner", "local", "language"),
    }
    closed = [event.reason for event in run.events if isinstance(event, LinkClosed)]
    assert closed == ["used"] * 3


async def test_warming_sends_no_upstream_text(clients: tuple[Client, Client], guide: str) -> None:
    run = await run_once(lambda: chain(clients, guide), clients, "Go.", "warmed")
    for turn in run.turns[2:]:
        assert turn.usage is not None and turn.usage.late_tokens is not None
        # At least the two upstream texts are missing, which warming does not send.
        assert turn.usage.late_tokens > 24


async def test_a_run_leaves_nothing_behind(
    clients: tuple[Client, Client],
    guide: str,
    client: EngineClient,
    downstream_client: EngineClient,
) -> None:
    team = RoundRobinGroupChat(
        [AssistantAgent(name, model_client=clients[i]) for i, name in enumerate(("one", "two"))],
        termination_condition=MaxMessageTermination(4),
    )
    events: list[Event] = []
    linked = link(team, listener=events.append)
    await team.run(task=guide[:500])
    # The team was stopped by its condition, so that the agent whose turn was next never spoke.
    await linked.close()
    await wait_until_idle(client)
    await wait_until_idle(downstream_client)
    assert {type(event) for event in events} >= {LinkOpened, LinkClosed, CallFinished}


async def test_cancelling_a_team_ends_its_links(
    engine: LocalEngine,
    downstream: LocalEngine,
    client: EngineClient,
    downstream_client: EngineClient,
) -> None:
    endless = make(engine, 20000), make(downstream)
    team = RoundRobinGroupChat(
        [AssistantAgent(name, model_client=endless[i]) for i, name in enumerate(("one", "two"))],
        max_turns=2,
    )
    events: list[Event] = []
    link(team, listener=events.append)
    token = CancellationToken()

    async def cancel() -> None:
        with anyio.fail_after(30):
            while not any(isinstance(event, LinkOpened) for event in events):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        token.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cancel)
        with pytest.raises(BaseException, match=r"(?i)cancel|^$"):
            await team.run(task="Go.", cancellation_token=token)
    for one in endless:
        await one.close()
    await wait_until_idle(client)
    await wait_until_idle(downstream_client)
    assert any(isinstance(event, LinkClosed) for event in events)


async def test_a_plain_server_works_with_one_warning(
    plain_engine: LocalEngine,
    guide: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashmoa.linking.prompt_feed._logged", set())
    plain = make(plain_engine)
    build: Callable[[], RoundRobinGroupChat] = lambda: chain((plain, plain), guide)  # noqa: E731
    try:
        with caplog.at_level(logging.WARNING, "flashmoa"):
            first = await run_once(build, [plain], "Go.", "linked")
            second = await run_once(build, [plain], "Go.", "linked")
        unlinked = await run_once(build, [plain], "Go.", "unlinked")
    finally:
        await plain.close()
    assert first.texts == second.texts == unlinked.texts
    warnings = [
        record for record in caplog.records if "without the flashmoa-sglang" in record.message
    ]
    assert len(warnings) == 1


async def test_prompts_on_a_plain_server_are_prefilled_while_agents_before_write(
    engine: LocalEngine, plain_engine: LocalEngine, guide: str
) -> None:
    clients = make(engine, 200), make(plain_engine)

    def build() -> RoundRobinGroupChat:
        agents = [
            AssistantAgent("writer", model_client=clients[0]),
            AssistantAgent("reader", model_client=clients[1], system_message=guide[:6000]),
        ]
        return RoundRobinGroupChat(agents, max_turns=2)

    unlinked = await run_once(build, clients, "Go.", "unlinked")
    linked = await run_once(build, clients, "Go.", "linked")
    for client in clients:
        await client.close()
    assert linked.texts == unlinked.texts
    before, after = (run.turns[-1].usage for run in (unlinked, linked))
    assert before is not None and after is not None
    assert before.prompt_tokens == after.prompt_tokens
    assert (before.cached_tokens or 0) < 10
    advanced = [
        event
        for event in linked.events
        if isinstance(event, LinkAdvanced) and event.agent == "reader"
    ]
    assert 1000 < advanced[-1].prefilled_tokens - 8 <= (after.cached_tokens or 0)


async def test_links_to_a_plain_server_can_be_turned_off(
    plain_engine: LocalEngine, guide: str
) -> None:
    client = Client(model="tiny", base_url=plain_engine.url, without_plugin="off", max_tokens=12)
    again = Client.load_component(client.dump_component())
    assert again.engine.without_plugin == "off"
    try:
        linked = await run_once(lambda: chain((client, again), guide), [client], "Go.", "linked")
    finally:
        await client.close()
        await again.close()
    assert not any(isinstance(event, LinkOpened) for event in linked.events)


async def test_the_answer_of_an_agent_with_tools_is_not_streamed(
    clients: tuple[Client, Client], guide: str
) -> None:
    """Its text is not streamed as it is written; the answers stay the same."""

    async def look(place: str) -> str:
        return f"a fine {place}"

    def build() -> RoundRobinGroupChat:
        one = AssistantAgent("one", model_client=clients[0], tools=[look])
        two = AssistantAgent("two", model_client=clients[1], system_message=guide[:2000])
        return RoundRobinGroupChat([one, two], max_turns=2)

    plain = await run_once(build, clients, "Go.", "unlinked")
    linked = await run_once(build, clients, "Go.", "linked")
    assert linked.texts == plain.texts
    assert linked.turns[-1].usage is not None
    assert linked.turns[-1].usage.prompt_stream is not None
    assert linked.turns[-1].usage.prompt_stream.status == "hit"


async def test_link_refuses_objects_that_it_cannot_link(clients: tuple[Client, Client]) -> None:
    with pytest.raises(TypeError, match="AssistantAgent"):
        link(AssistantAgent("one", model_client=clients[0]))  # type: ignore[arg-type]
    others = OpenAIChatCompletionClient(model="gpt-4o", api_key="none")
    with pytest.raises(ValueError, match="nothing to link"):
        link(RoundRobinGroupChat([AssistantAgent("one", model_client=others)]))
    await others.close()


async def test_watching_links_nothing(clients: tuple[Client, Client], guide: str) -> None:
    events: list[Event] = []
    team = chain(clients, guide)
    watched = watch(team, events.append)
    await team.run(task="Go.")
    await watched.close()
    assert not any(isinstance(event, LinkOpened) for event in events)
    assert sum(isinstance(event, CallFinished) for event in events) == 4


async def test_a_run_is_traced(
    clients: tuple[Client, Client], guide: str, tmp_path: Path, client: EngineClient
) -> None:
    file, events = tmp_path / "run.jsonl", list[Event]()
    team = chain(clients, guide)
    linked = link(team, trace=file, listener=events.append)
    await team.run(task="Go.")
    await linked.close()
    # Prompts are only recorded on request.
    prompts = [event for event in events if isinstance(event, PromptSent)]
    assert len(prompts) == 4
    assert read(file) == [event for event in events if event not in prompts]
    with pytest.raises(ValueError, match="give trace=FILE, too"):
        link(team, trace_prompts=True)
    with pytest.raises(OSError):
        link(team, trace=tmp_path / "nowhere" / "run.jsonl")
    await wait_until_idle(client)
