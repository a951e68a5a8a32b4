"""Test GraphFlow with random graphs and speeds: every prompt is predicted."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, Sequence

import pytest
from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig, PerSourceFilter
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event
from tests.integration.autogen.exactness import CallOutcome, count_outcomes, finished_calls
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient

RUNS = int(os.environ.get("FLASHMOA_GRAPH_RUNS", "12"))
Edges = list[tuple[int, int]]


@pytest.fixture
async def speeds(engine: LocalEngine) -> AsyncGenerator[list[Client]]:
    """Yield clients, each of which takes longer to answer than the one before."""
    clients = [
        Client(
            model="tiny",
            base_url=engine.url,
            temperature=0,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )
        for tokens in (3, 8, 20, 45)
    ]
    yield clients
    for client in clients:
        await client.close()


def agents(dice: random.Random, speeds: Sequence[Client], names: Sequence[str]) -> list[object]:
    return [
        AssistantAgent(
            name,
            model_client=dice.choice(speeds),
            model_client_stream=dice.random() < 0.5,
            system_message=f"You are {name}.",
        )
        for name in names
    ]


def flow(members: Sequence[object], edges: Edges) -> GraphFlow:
    builder = DiGraphBuilder()
    for member in members:
        builder.add_node(member)  # type: ignore[arg-type]
    for start, end in edges:
        builder.add_edge(members[start], members[end])  # type: ignore[arg-type]
    return GraphFlow(list(members), graph=builder.build())  # type: ignore[arg-type]


async def run(team: GraphFlow, task: str) -> list[CallOutcome]:
    events: list[Event] = []
    linked = link(team, listener=events.append)
    await team.run(task=task)
    await linked.close()
    return finished_calls(events)


@pytest.mark.slow
async def test_fan_out_and_in_at_random_speeds(speeds: list[Client], guide: str) -> None:
    """Messages come in the order in which agents finish, or in the filter's: both are predicted."""
    dice = random.Random(3)
    for number in range(RUNS):
        chair, *reviewers, meta = agents(dice, speeds, ["chair", "rev0", "rev1", "rev2", "meta"])
        if number % 2:
            wanted = [PerSourceFilter(source=n) for n in ("user", "rev0", "rev1", "rev2")]
            meta = MessageFilterAgent("meta", meta, MessageFilterConfig(per_source=wanted))  # type: ignore[arg-type]
        edges: Edges = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
        team = flow([chair, *reviewers, meta], edges)
        first, *calls = await run(team, guide[number % 10 * 50 : 700])
        assert first == CallOutcome("chair", None, first.late_tokens)
        assert {call.agent for call in calls} == {"rev0", "rev1", "rev2", "meta"}
        count_outcomes("fan-out and fan-in, random speeds", calls)
        assert {call.status for call in calls} <= {"hit", "late"}
    await wait_until_idle(speeds[0].engine)


@st.composite
def graphs(draw: st.DrawFn) -> Edges:
    """Draw a connected graph without cycles that begins with agent 0."""
    size = draw(st.integers(2, 6))
    edges = {(draw(st.integers(0, end - 1)), end) for end in range(1, size)}
    more = [(start, end) for end in range(size) for start in range(end)]
    return sorted(edges | set(draw(st.lists(st.sampled_from(more), max_size=5))))


@pytest.mark.slow
@given(edges=graphs(), seed=st.integers(0, 1 << 16))
@settings(max_examples=RUNS, deadline=None, suppress_health_check=list(HealthCheck))
async def test_any_graph_is_predicted(
    speeds: list[Client], guide: str, edges: Edges, seed: int
) -> None:
    names = [f"a{number}" for number in range(1 + max(end for _, end in edges))]
    team = flow(agents(random.Random(seed), speeds, names), edges)
    first, *calls = await run(team, guide[seed % 10 * 50 : 700])
    assert first.agent == "a0" and first.status is None
    assert {call.agent for call in calls} == set(names[1:])
    count_outcomes("graphs made by hypothesis", calls)
    assert {call.status for call in calls} <= {"hit", "late"}
    await wait_until_idle(speeds[0].engine)
