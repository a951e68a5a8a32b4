"""What ``link`` refuses, replaces and traces, and when a forecast still holds; without engines."""

import gc
import weakref
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from flashmoa import EngineClient
from flashmoa._stack import owners
from flashmoa.autogen import link
from flashmoa.frameworks.autogen.team_link import awaits, has_received
from flashmoa.frameworks.autogen.team_members import TeamMembers
from flashmoa.link.calls import CallRequest
from flashmoa.link.expected import Turn
from flashmoa.link.prompt import UNCERTAIN, Prompt, Slot
from flashmoa.link.reasons import UNEXPECTED
from flashmoa.observe import (
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    LinkDeclined,
    LinkOpened,
    PromptSent,
)
from flashmoa.observe.events import FIRST
from flashmoa.observe.trace import read
from tests.unit.events import of_kind
from tests.unit.frameworks.autogen.teams import Client, make_client, make_team, team_of
from tests.unit.openai.fake_server import URL, FakeServer, serve
from tests.waiting import until

NOTE = LinkDeclined(agent="one", engine="", reason="test")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    async def kv_pool_tokens(_: EngineClient) -> int:
        return 10_000

    monkeypatch.setattr(EngineClient, "kv_pool_tokens", kv_pool_tokens)
    return serve(monkeypatch)


@pytest.fixture
async def client(server: FakeServer) -> AsyncGenerator[Client]:
    client = make_client(max_retries=0)
    yield client
    await client.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["four"]}, r"include names \['four'\]; the agents are"),
        ({"on_failure": {"four": "finalize"}}, r"on_failure names \['four'\]; the agents are"),
        ({"nonsense": 1}, r"no option 'nonsense'; the options are .*, kv_share, include$"),
    ],
    ids=str,
)
def test_senseless_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        link(make_team(make_client()), **arguments)


def test_what_cannot_be_linked_is_refused() -> None:
    with pytest.raises(TypeError, match="not a AssistantAgent"):
        link(AssistantAgent("one", make_client()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to link"):
        link(make_team(OpenAIChatCompletionClient(model="gpt-4o", api_key="none")))


async def test_linking_again_replaces_link_and_trace(client: Client, tmp_path: Path) -> None:
    """A cell of a notebook may be run once more."""
    team, file = make_team(client), tmp_path / "run.jsonl"
    first = link(team, trace=file)  # Held here, so that it does not go by itself.
    first._planner.listener(NOTE)
    assert read(file) == [NOTE]
    second = link(team, trace=file)
    assert read(file) == [] and first not in client.linked_teams
    assert list(client.linked_teams) == [second]
    await second.close()
    assert list(client.linked_teams) == []


async def test_an_inner_team_does_not_end_its_trace(client: Client, tmp_path: Path) -> None:
    """The inner team may be linked on its own afterwards, and its link be closed."""
    file, inner = tmp_path / "run.jsonl", make_team(client)
    outer = link(team_of(SocietyOfMindAgent("group", inner, client)), trace=file)
    outer._planner.listener(NOTE)
    assert [within.report for within in outer._inner] == [outer.report]
    await link(inner, trace=file).close()
    another = link(make_team(client, "two"), trace=file)
    assert read(file) == [NOTE]
    for each in (outer, another):
        await each.close()
    link(make_team(client, "three"), trace=file)
    assert read(file) == []


def test_a_link_that_cannot_be_made_ends_no_trace(tmp_path: Path) -> None:
    client, file = make_client(), tmp_path / "run.jsonl"
    team = make_team(client)
    link(team, trace=file)._planner.listener(NOTE)
    (tmp_path / "notes").write_text("Not a trace.")
    with pytest.raises(ValueError, match="is not a trace"):
        link(team, trace=tmp_path / "notes")
    link(make_team(client, "two"), trace=file)
    assert read(file) == [NOTE]


async def test_a_clients_or_teams_listener_gets_calls(server: FakeServer) -> None:
    events: list[Event] = []
    client = make_client(listener=events.append, max_retries=0)
    await make_team(client, "one", "two").run(task="Go.")
    ended = [event.agent for event in events if isinstance(event, CallStarted | CallFinished)]
    assert ended == ["one", "one", "two", "two"]
    events.clear()
    team, others = make_team(client), list[Event]()
    async with link(team, listener=others.append):
        await team.run(task="Go.")
    assert not events and len(of_kind(others, CallStarted)) == 1
    server.chat = lambda _: httpx.Response(400, json={})
    with pytest.raises(Exception, match="400"):
        await client.create([UserMessage(content="Go.", source="user")])
    assert [type(event) for event in events] == [CallStarted, PromptSent, CallFailed]
    await client.close()


async def test_the_first_call_of_each_run_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run may not have been noticed when the next run begins."""
    async with link(make_team(client, "one", "two")) as linked:
        planner, runs = linked._planner, iter("aab")
        monkeypatch.setattr(TeamMembers, "current_run", property(lambda _: next(runs)))
        monkeypatch.setattr(planner, "plan", lambda: None)
        for agent in ("one", "two", "one"):
            planner.begin(agent, CallRequest(URL, "m", None))
        reasons = [call.started.unlinked for call in linked.report.calls]
    assert reasons == [FIRST, UNEXPECTED, FIRST]


async def test_an_unknown_manager_is_a_reason(client: Client) -> None:
    class Backwards(RoundRobinGroupChatManager):
        """Could choose speakers in any order, and chooses them once the team was looked at."""

        async def select_speaker(self, thread: Any) -> Any:
            await until(lambda: not linked._planner._planning.is_running)
            return await super().select_speaker(thread)

    class Team(RoundRobinGroupChat):
        def _create_group_chat_manager_factory(self, *given: Any, **named: Any) -> Any:
            make = super()._create_group_chat_manager_factory(*given, **named)

            def make_mine() -> Any:
                manager = make()
                manager.__class__ = Backwards
                return manager

            return make_mine

    team = Team([AssistantAgent(name, client) for name in ("one", "two")], max_turns=2)
    async with link(team) as linked:
        await team.run(task="Go.")
        reasons = [call.started.unlinked for call in linked.report.calls]
    rule = "its team's Backwards chooses speakers by rules that are not AutoGen's own"
    assert reasons == [FIRST, rule]


@pytest.mark.usefixtures("server")
async def test_auto_link_links_any_team_that_it_can(caplog: pytest.LogCaptureFixture) -> None:
    """Links do not find the client of the second team's agent; the third link fails."""

    class Own(AssistantAgent):
        async def on_messages_stream(self, *arguments: Any) -> Any:
            self._model_client = client
            async for item in super().on_messages_stream(*arguments):
                yield item
            del self._model_client

    client = make_client(auto_link=True)
    await make_team(client).run(task="Go.")
    assert len(client.linked_teams) == 1
    agent = Own("one", client)
    del agent._model_client
    assert len((await team_of(agent).run(task="Go.")).messages) == 2
    assert not caplog.messages
    client._link_caller = lambda **_: 1 / 0  # type: ignore[assignment, return-value]
    assert len((await make_team(client).run(task="Go.")).messages) == 2
    assert "runs unlinked because of the error below" in caplog.text
    await client.close()


def count(events: list[Event], kind: type[Event]) -> Counter[str]:
    return Counter(event.agent for event in of_kind(events, kind))


async def test_teams_that_run_once_leave_no_stream_open(client: Client) -> None:
    """A server may make a team for each request."""
    events: list[Event] = []
    teams = [make_team(client, "one", "two") for _ in range(20)]
    links = [link(team, listener=events.append) for team in teams]
    for team in teams:
        await team.run(task="Go.")
    # A team's tasks end when the end of its run is noticed, unless they wait for a next run.
    await until(lambda: not any(each._planner.host._group_tasks for each in links))
    assert not count(events, LinkOpened)["one"]
    for each in links:
        await each.close()


@pytest.mark.parametrize("pause", [False, True])
async def test_a_second_run_links_the_next(client: Client, pause: bool) -> None:
    """A run may also begin before the end of the previous run is noticed."""
    events, team = list[Event](), make_team(client, "one", "two")
    async with link(team, listener=events.append) as linked:
        await team.run(task="Go.")
        if pause:
            await until(lambda: not linked._planner.host._group_tasks)
        await team.run(task="Go on.")
        await until(lambda: count(events, LinkOpened)["one"])


@pytest.mark.parametrize(
    ("slots", "received", "expected", "is_used"),
    [([], 1, 1, True), ([], 2, 1, False), ([], 0, 1, False)]
    + [([UNCERTAIN], received, 0, True) for received in (0, 5)],
)
def test_a_link_is_used_if_its_forecast_came_true(
    slots: list[str], received: int, expected: int, is_used: bool
) -> None:
    """A link with an uncertain end is used whatever comes."""
    assert has_received(received, expected, Prompt(["known", *map(Slot, slots)])) is is_used


def test_a_link_waits_only_for_forecast_messages() -> None:
    turn, later = Turn("b", (frozenset("a"),)), Turn("b", (frozenset("x"), frozenset("a")))
    waiting = Prompt(["known", Slot("a")])
    assert awaits(turn, 1, waiting)
    assert not awaits(turn, 0, waiting) and not awaits(later, 1, waiting)
    assert not awaits(turn, 1, Prompt(["known", Slot("a"), Slot(UNCERTAIN)]))


class Agent:
    def ask(self) -> tuple[list[object], weakref.ref[object]]:
        local = type("Prompt", (), {})()
        return owners(), weakref.ref(local)


def test_a_look_at_the_stack_keeps_nothing_alive() -> None:
    """Prompts and answers are freed at once, and not at the next garbage collection."""
    gc.disable()
    try:
        agent = Agent()
        found, prompt = agent.ask()
        assert found[0] is agent
        assert prompt() is None
    finally:
        gc.enable()
