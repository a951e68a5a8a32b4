"""What ``link`` refuses, replaces and traces, and when a forecast still holds; without engines."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import httpx
import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from flashmoa._stack import owners
from flashmoa.autogen import FlashMoAChatCompletionClient, link
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
    PromptSent,
)
from flashmoa.observe.events import FIRST, LATE
from flashmoa.observe.trace import read
from tests.unit.frameworks.autogen.test_overriding import INFO
from tests.unit.openai.fake_server import URL, serve

NOTE = LinkDeclined(agent="one", engine="", reason="test")


def make_client(**more: Any) -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient(model="m", base_url=URL, model_info=INFO, **more)


def make_team(client: Any, *names: str) -> RoundRobinGroupChat:
    members = [AssistantAgent(name, client) for name in names or ("one",)]
    return RoundRobinGroupChat(members, max_turns=len(members))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["four"]}, r"include names \['four'\]; the agents are"),
        ({"on_failure": {"four": "finalize"}}, r"on_failure names \['four'\]; the agents are"),
        ({"on_failure": "ignore"}, "error must be 'abort' or 'finalize'"),
        ({"trace_prompts": True}, "give trace=FILE, too"),
        ({"nonsense": 1}, r"no option 'nonsense'; the options are .*, kv_share, include$"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        link(make_team(make_client()), **arguments)


def test_what_cannot_be_linked_is_refused() -> None:
    with pytest.raises(TypeError, match="not a AssistantAgent"):
        link(AssistantAgent("one", make_client()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to link"):
        link(make_team(OpenAIChatCompletionClient(model="gpt-4o", api_key="none")))


async def test_linking_again_replaces_the_link_and_its_trace(tmp_path: Path) -> None:
    """As when a cell of a notebook is run once more."""
    client = make_client()
    team, file = make_team(client), tmp_path / "run.jsonl"
    first = link(team, trace=file)  # Held here, so that it does not go by itself.
    first._planner.listener(NOTE)
    assert read(file) == [NOTE]
    second = link(team, trace=file)
    assert read(file) == [] and first not in client.linked_teams
    assert list(client.linked_teams) == [second]
    await second.close()
    assert list(client.linked_teams) == []


async def test_an_inner_team_does_not_end_its_trace(tmp_path: Path) -> None:
    """It may be linked on its own afterwards, and its link be closed."""
    client, file = make_client(), tmp_path / "run.jsonl"
    inner = make_team(client)
    group = SocietyOfMindAgent("group", inner, client)
    outer = link(RoundRobinGroupChat([group], max_turns=1), trace=file)
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


async def test_calls_go_to_the_clients_or_teams_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, events = serve(monkeypatch), list[Event]()
    client = make_client(listener=events.append, max_retries=0)
    await make_team(client, "one", "two").run(task="Go.")
    ended = [event.agent for event in events if isinstance(event, CallStarted | CallFinished)]
    assert ended == ["one", "one", "two", "two"]
    events.clear()
    team, others = make_team(client), list[Event]()
    linked = link(team, listener=others.append)
    await team.run(task="Go.")
    await linked.close()
    assert not events
    assert sum(isinstance(event, CallStarted) for event in others) == 1
    server.chat = lambda _: httpx.Response(400, json={})
    with pytest.raises(Exception, match="400"):
        await client.create([UserMessage(content="Go.", source="user")])
    assert [type(event) for event in events] == [CallStarted, PromptSent, CallFailed]
    await client.close()


async def test_the_first_call_of_each_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run may not have been noticed when the next one begins."""
    client = make_client()
    linked = link(make_team(client, "one", "two"))
    planner, runs = linked._planner, iter("aab")
    monkeypatch.setattr(TeamMembers, "current_run", property(lambda _: next(runs)))
    monkeypatch.setattr(planner, "plan", lambda: None)
    for agent in ("one", "two", "one"):
        planner.begin(agent, CallRequest(URL, "m", None))
    reasons = [call.started.unlinked for call in linked.report.calls]
    assert reasons == [FIRST, UNEXPECTED, FIRST]
    await linked.close()
    await client.close()


async def test_an_unknown_manager_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Backwards(RoundRobinGroupChatManager):
        """Could choose speakers in any order."""

    class Team(RoundRobinGroupChat):
        def _create_group_chat_manager_factory(self, *given: Any, **named: Any) -> Any:
            make = super()._create_group_chat_manager_factory(*given, **named)

            def make_mine() -> Any:
                manager = make()
                manager.__class__ = Backwards
                return manager

            return make_mine

    serve(monkeypatch)
    client = make_client()
    team = Team([AssistantAgent(name, client) for name in ("one", "two")], max_turns=2)
    async with link(team) as linked:
        await team.run(task="Go.")
        reasons = [call.started.unlinked for call in linked.report.calls]
    await client.close()
    assert reasons[0] == FIRST
    assert reasons[1] in (
        LATE,  # The team was not looked at yet.
        "its team's Backwards chooses speakers by rules that are not AutoGen's own",
    )


async def test_auto_link_links_a_team_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    client = make_client(auto_link=True)
    team = make_team(client)
    await team.run(task="Go.")
    assert len(client.linked_teams) == 1
    await client.close()


async def test_auto_link_runs_a_team_that_it_cannot_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Links do not find the client of its agent."""
    serve(monkeypatch)

    class Own(AssistantAgent):
        async def on_messages_stream(self, *arguments: Any) -> Any:
            self._model_client = client
            async for item in super().on_messages_stream(*arguments):
                yield item
            del self._model_client

    client = make_client(auto_link=True)
    agent = Own("one", client)
    del agent._model_client
    team = RoundRobinGroupChat([agent], max_turns=1)
    assert len((await team.run(task="Go.")).messages) == 2
    await client.close()


@pytest.mark.parametrize(
    ("slots", "received", "expected", "is_used"),
    [([], 1, 1, True), ([], 2, 1, False), ([], 0, 1, False)]
    + [([UNCERTAIN], received, 0, True) for received in (0, 5)],
)
def test_a_link_is_used_if_its_forecast_came_true(
    slots: list[str], received: int, expected: int, is_used: bool
) -> None:
    """One whose end is uncertain is used whatever comes."""
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
    """Prompts and answers are freed at once, and not when the garbage collector comes by."""
    gc.disable()
    try:
        agent = Agent()
        found, prompt = agent.ask()
        assert found[0] is agent
        assert prompt() is None
    finally:
        gc.enable()
