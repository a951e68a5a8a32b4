"""Clusters: when answers are copied, left out and cut, and what early exit's decisions cost."""

import random
import time
from typing import Any, cast

import anyio
import pytest

from flashmoa import EngineClient, Text
from flashmoa.moa import Limits, Model
from flashmoa.moa.agent import Agent
from flashmoa.moa.cluster import AnswerSlot, Cluster, Member
from flashmoa.moa.early_exit import EarlyExit, ScoredAnswers
from flashmoa.moa.settings import Quorum
from tests.unit.moa.embedders import Embedder

ENDLESS = EarlyExit(Embedder(anyio.sleep_forever))


def members(*texts: str | None) -> list[Member]:
    """Return a member for each answer; an answer of ``None`` is never written."""
    result: list[Member] = []
    for place, text in enumerate(texts):
        model = Model(EngineClient("http://127.0.0.1:9"))
        agent = Agent(cast("Any", None), Limits(), 0, place, model)
        if text is not None:
            write(agent, text)
        result.append(Member(agent, [AnswerSlot(Text(f"slot {place}"))]))
    return result


def write(agent: Agent, text: str) -> None:
    agent._write(text)
    agent._close()


async def run_cluster(
    agents: list[Member], policy: EarlyExit | None = None, quorum: Quorum | None = None
) -> Cluster:
    async def unlimited() -> None:
        return None

    scores = ScoredAnswers(policy, random.Random(0), len(agents)) if policy is not None else None
    cluster = Cluster(agents, unlimited, scores, quorum)
    with anyio.fail_after(10):
        await cluster.run()
    return cluster


async def test_deciding_counts_waits_for_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    async def two_seconds() -> None:
        nonlocal now
        now += 2

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(EarlyExit, "suffices", lambda *_: now > 102)
    policy = EarlyExit(Embedder(two_seconds))
    cluster = await run_cluster(members("one", "two", "three", None), policy)
    # The third answer was complete at once, but was scored after the second.
    assert [decision.seconds for decision in cluster.decisions] == [2, 4]
    assert cluster.deciding == 4
    assert cluster.last.agent.record.place == 2
    cluster = await run_cluster(members("one", "two"))
    assert cluster.deciding == 0 and not cluster.decisions


@pytest.mark.parametrize("last", ["three", None], ids=["complete", "failed"])
async def test_decisions_end_when_no_answer_can_come(last: str | None) -> None:
    agents = members("one", "two", last)
    if last is None:
        agents[2].agent._fail(RuntimeError("gone"))
    cluster = await run_cluster(agents, ENDLESS)
    assert [member.used for member in agents] == [True, True, last is not None]
    assert not cluster.decisions


async def test_an_answer_streams_while_one_is_scored() -> None:
    agents = members("one", "two", None, None)
    async with anyio.create_task_group() as group:
        group.start_soon(run_cluster, agents, ENDLESS)
        agents[2].agent._write("three")
        await anyio.wait_all_tasks_blocked()
        assert agents[1].slots[0].text.is_complete
        assert agents[2].slots[0].text.written == "three"
        group.cancel_scope.cancel()


async def test_an_agent_with_another_reader_goes_on() -> None:
    agents = members("one", None)
    Cluster([Member(agents[1].agent, [])], anyio.sleep_forever)
    agents[0].agent.asked.set()
    await run_cluster(agents, quorum=Quorum(1, 0.0))
    assert agents[1].used is False and not agents[1].agent.is_over


async def test_quorum_leaves_out_late_answers() -> None:
    agents = members("one", None, None)
    agents[2].agent.asked.set()
    async with anyio.create_task_group() as group:
        group.start_soon(run_cluster, agents, None, Quorum(2, 0.0))
        await anyio.wait_all_tasks_blocked()
        assert [member.used for member in agents] == [True, None, None]
        write(agents[1].agent, "two")
    assert [member.used for member in agents] == [True, True, False]
    assert await agents[2].slots[0].text == "" and not agents[2].agent.record.problem


async def test_answers_are_copied_before_room_is_known() -> None:
    agents, known = members("one", None), anyio.Event()
    cluster = Cluster(agents, find_room=cast("Any", known.wait), room_timeout=60)
    async with anyio.create_task_group() as group:
        group.start_soon(cluster.run)
        agents[1].agent._write("two")
        await anyio.wait_all_tasks_blocked()
        assert [member.slots[0].text.written for member in agents] == ["one", "two"]
        assert not any(member.slots[0].text.is_over for member in agents)
        agents[1].agent._close()
        known.set()
    assert all(member.slots[0].text.is_complete for member in agents)


async def test_answers_do_not_wait_for_a_silent_engine() -> None:
    agents = members("one", "two")
    cluster = Cluster(agents, find_room=anyio.sleep_forever, room_timeout=0.01)
    with anyio.fail_after(10):
        await cluster.run()
    assert [await member.slots[0].text for member in agents] == ["one", "two"]
