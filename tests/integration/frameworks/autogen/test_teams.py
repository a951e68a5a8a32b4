"""Test every stock team linked on a real engine: prompts are predicted, answers are the same."""

import os
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import MagenticOneGroupChat, Swarm
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.observe import LinkDeclined, LinkOpened
from tests.chat_templates import ALTERNATING, TEMPLATES
from tests.integration.frameworks.autogen import teams
from tests.integration.frameworks.autogen.runs import (
    Client,
    Run,
    check_predicted,
    connected,
    make,
    run_both_ways,
    run_once,
    run_team,
)
from tests.integration.frameworks.autogen.teams import Build, agent, agents, filtered, graph, swarm
from tests.integration.scripted import Script, script
from tests.integration.support import (
    nightly,
    slow,
    start_special_engine,
    wait_until_idle,
)
from tests.unit.frameworks.autogen.test_turn_order import graphs
from tests.waiting import LAG


@dataclass(frozen=True)
class Kind:
    """A kind of team.

    Attributes:
        first: agents whose first call cannot be predicted.
        include: agents of user-defined classes to link.
        never: agents that are not linked.
        make_script: makes the script of a run.
    """

    build: Build
    first: tuple[str, ...] = ("one",)
    include: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    make_script: Callable[[], Script] | None = None


def script_selector() -> Script:
    turns = iter(["two", "three", "one", "three", "two"])
    asks = "You decide who speaks next"
    return lambda request: next(turns) if asks in request["messages"][-1]["content"] else None


KINDS = {
    "round robin": Kind(teams.round_robin),
    "streaming": Kind(teams.streaming),
    "bounded contexts": Kind(teams.bounded),
    "memory": Kind(teams.remembering),
    "chain": Kind(teams.chain),
    "fan": Kind(teams.fan, ("chair",)),
    "filtered fan": Kind(teams.filtered_fan, ("chair",)),
    "conditional": Kind(teams.conditional, ("writer",)),
    "cycle": Kind(teams.cycle, ("writer",)),
    "selector": Kind(teams.selecting, ("(manager)",)),
    "selector, our prompt": Kind(teams.prompted, ("(manager)",), make_script=script_selector),
    "nested": Kind(teams.nested, ("one", "in1")),
    "society": Kind(teams.society, ("one", "in1")),
    "custom": Kind(teams.custom, never=("mine",)),
    "custom, included": Kind(teams.custom, include=("mine",)),
}
QUICK = {
    "round robin", "filtered fan", "conditional", "cycle", "selector", "selector, our prompt",
}  # fmt: skip


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in KINDS])
async def test_every_linkable_call_is_predicted_and_nothing_changes(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind, task, runs = KINDS[name], guide[:800], list[Run]()
    for mode in ("unlinked", "linked"):
        if kind.make_script is not None:
            script(monkeypatch, kind.make_script())
        include = {"include": kind.include} if mode == "linked" else {}
        build = partial(kind.build, model_client)
        runs.append(await run_once(build, [model_client], task, mode, **include))
    plain, linked = runs
    assert sorted(linked.messages[:-1]) == sorted(plain.messages[:-1])
    last = plain.messages[-1]
    if kind.build is teams.fan:  # The last agent reads the reviewers as they finish: a race.
        last = await answer(model_client, linked.messages[:-1], "meta")
    assert linked.messages[-1] == last
    calls = linked.calls
    for agent_name in kind.first:
        first = next(call for call in calls if call.agent == agent_name)
        assert first.status is None
        calls.remove(first)
    never = [call for call in calls if call.agent in kind.never]
    assert not {call.status for call in never} - {None}
    check_predicted([call for call in calls if call not in never])


async def answer(client: Client, messages: list[tuple[str, str]], name: str) -> tuple[str, str]:
    """Return an agent's name, and its answer to ``messages`` outside any team."""
    given = [TextMessage(content=text, source=source) for source, text in messages]
    response = await agent(client, name).on_messages(given, CancellationToken())
    return name, response.chat_message.to_text()


@pytest.mark.slow
async def test_an_orchestrators_prompts_are_predicted(
    engine: LocalEngine, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, ledgers = teams.orchestrate(monkeypatch, turns=3)
    async with connected(engine, model_info=info) as (client,):
        members = agents(client, "coder writer")
        team = MagenticOneGroupChat(members, model_client=client, max_turns=6)
        calls = (await run_team(team, guide[:600])).calls
    manager = "(manager)"
    reading = [b for a, b in pairwise(calls) if b.agent == manager and a.agent != manager]
    assert len(reading) == 3
    speaking = [call for call in calls if call.agent != manager]
    check_predicted([*reading, *speaking])
    assert len(ledgers) == 4


def speaker(request: dict[str, Any]) -> str:
    return str(request["messages"][0]["content"]).split()[2].rstrip(".")


async def look(place: str) -> str:
    """Look at a place."""
    return f"a fine {place}"


TWO = {"alice": ["bob"], "bob": ["alice"]}


@pytest.mark.parametrize(
    "extra", [None, "I hand this over.", slow(("look", {"place": "lake"}))], ids=str
)
async def test_handoff_targets_are_linked_up_to_the_handoff(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, extra: Any
) -> None:
    """A thought or another tool's result beside a handoff is not mispredicted."""

    def answer_to(request: dict[str, Any]) -> Any:
        handoff = (f"transfer_to_{TWO[speaker(request)][0]}", {})
        return handoff if extra is None else [extra, handoff]

    script(monkeypatch, answer_to)
    tools = {} if extra is None else {"tools": [look]}
    team = partial(swarm, model_client, TWO, 10, **tools)
    run = await run_both_ways(team, [model_client], guide[:900])
    calls = run.calls
    assert len(calls) > 3
    check_predicted(calls[1:])
    # An agent that hands off does not ask again, whatever other tools it calls.
    upstream = [name for event in run.events_of(LinkOpened) for name in event.upstream]
    assert not any("()" in name for name in upstream)
    if extra is not None:
        return
    assert [call.agent for call in calls] == ["alice", "bob"] * 4 + ["alice"]
    message = UserMessage(
        content="Transferred to alice, adopting the role of alice immediately.", source="bob"
    )
    # All tokens before the handoff's message were prefilled, except for the template's tokens
    # around this message and tokens that are too few for a forward. The first target's prompt may
    # be left: nothing of this prompt is cached, and streams on a CPU may wait for decodes to end.
    left = 16 + LAG + await anyio.to_thread.run_sync(model_client.count_tokens, [message])
    late = [call.late_tokens for call in calls[2:] if call.status == "hit"]
    assert max(late) <= left


@pytest.mark.slow
async def test_a_target_is_linked_when_a_later_speaker_can_hand_off_to_it(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(())
    handoffs = {"planner": ["analyst", "writer"], "analyst": ["planner"], "writer": ["planner"]}

    def answer_to(request: dict[str, Any]) -> Any:
        name = next(turns, "writer") if speaker(request) == "planner" else "planner"
        return (f"transfer_to_{name}", {})

    def team() -> Swarm:
        nonlocal turns
        turns = iter(["analyst", "writer"] * 3)
        return swarm(model_client, handoffs, 10)

    script(monkeypatch, answer_to)
    run = await run_both_ways(team, [model_client], guide[:900])
    assert {call.agent for call in run.calls} == handoffs.keys()
    check_predicted(run.calls[1:])
    assert not run.events_of(LinkDeclined)
    # An agent is not linked while the speaker cannot hand off to it.
    assert [event.agent for event in run.events_of(LinkOpened)][:2] == ["analyst", "writer"]


@pytest.mark.parametrize(
    "family", [slow(family) if family == "chatml" else nightly(family) for family in TEMPLATES]
)
async def test_teams_on_a_familys_template_are_predicted_and_answer_the_same(
    engines: LocalEngines, model: Path, tmp_path: Path, guide: str, family: str
) -> None:
    template = tmp_path / f"{family}.jinja"
    template.write_text(TEMPLATES[family])
    arguments = ["--chat-template", str(template), "--enable-cache-report"]
    async with (
        start_special_engine(engines, model, *arguments) as engine,
        connected(engine, merge_user_messages=family in ALTERNATING) as (client,),
    ):
        for build in (teams.round_robin, teams.filtered_fan):
            plain = await run_once(partial(build, client), [client], guide[:800], "unlinked")
            linked = await run_once(partial(build, client), [client], guide[:800])
            # The reviewers finish in any order.
            assert sorted(linked.messages) == sorted(plain.messages)
            check_predicted(linked.calls[1:])


RUNS = int(os.environ.get("FLASHMOA_GRAPH_RUNS", "12"))
Edges = list[tuple[int, int]]


@pytest.fixture
async def speeds(engine: LocalEngine) -> AsyncGenerator[list[Client]]:
    """Yield clients; each takes longer to answer than the previous client."""
    clients = [make(engine, max_tokens=tokens) for tokens in (3, 8, 20, 45)]
    yield clients
    for client in clients:
        await client.close()


@pytest.mark.slow
@example(edges=teams.FAN, seed=3, filters=True)
@example(edges=teams.FAN, seed=4, filters=False)
@given(
    edges=graphs().map(lambda graph: sorted(graph[0])),
    seed=st.integers(0, 1 << 16),
    filters=st.booleans(),
)
@settings(max_examples=RUNS, deadline=None, suppress_health_check=list(HealthCheck))
async def test_any_graph_at_any_speed_is_predicted(
    speeds: list[Client], guide: str, edges: Edges, seed: int, filters: bool
) -> None:
    """Messages come in the order of the agents' ends or in the filter's: both are predicted."""
    dice = random.Random(seed)
    names = [f"a{number}" for number in range(1 + max(end for _, end in edges))]
    members: list[Any] = [
        agent(dice.choice(speeds), name, model_client_stream=dice.random() < 0.5) for name in names
    ]
    if filters:
        members[-1] = filtered(members[-1], ["user", *names[:-1]])
    run = await run_team(graph(members, edges), guide[seed % 10 * 50 : 700])
    first, *calls = run.calls
    assert first.agent == "a0" and first.status is None
    assert {call.agent for call in calls} == set(names[1:])
    assert {call.status for call in calls} <= {"hit", "late"}
    await wait_until_idle(speeds[0].engine)
