"""Early exit decisions: the delay that they cause, and their cancellation."""

from __future__ import annotations

import random
import time
from typing import Any, cast

import anyio
import numpy as np
import pytest

from flashmoa import EngineClient, Text
from flashmoa.moa import Limits, Model
from flashmoa.moa.agent import Agent
from flashmoa.moa.cluster import AnswerSlot, Cluster, Member
from flashmoa.moa.early_exit import EarlyExit, Embedding, ScoredAnswers
from flashmoa.moa.settings import Quorum

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that only embedding moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowEmbedder:
    """An embedder that takes two seconds of the clock for each text."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def embed(self, text: str) -> Embedding:
        self._clock.now += 2
        return np.ones((1, 4), dtype=np.float32)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def members(*texts: str | None) -> list[Member]:
    """Return a member for each answer; an answer of ``None`` is never written."""
    result: list[Member] = []
    flow = cast("Any", None)
    for place, text in enumerate(texts):
        agent = Agent(flow, Limits(), 0, place, Model(EngineClient("http://127.0.0.1:9")))
        if text is not None:
            agent._write(text)
            agent._close()
        result.append(Member(agent, [AnswerSlot(Text(f"slot {place}"))]))
    return result


async def run_cluster(
    agents: list[Member], policy: EarlyExit | None, quorum: Quorum | None = None
) -> Cluster:
    async def unlimited() -> None:
        return None

    scores = ScoredAnswers(policy, random.Random(0), len(agents)) if policy is not None else None
    cluster = Cluster(agents, unlimited, scores, quorum)
    await cluster.run()
    return cluster


async def test_deciding_counts_the_wait_for_earlier_decisions(clock: Clock) -> None:
    policy = EarlyExit(SlowEmbedder(clock), rule="threshold", threshold=0)
    cluster = await run_cluster(members("one", "two", None), policy)
    # The second answer was complete at once, but was scored after the first.
    assert [decision.seconds for decision in cluster.decisions] == [2, 4]
    assert cluster.deciding == 4
    assert cluster.last.agent.record.place == 1


async def test_cluster_without_early_exit_makes_no_decisions(clock: Clock) -> None:
    cluster = await run_cluster(members("one", "two"), None)
    assert cluster.deciding == 0 and not cluster.decisions


class EndlessEmbedder:
    """An embedder that never returns."""

    async def embed(self, text: str) -> Embedding:
        await anyio.sleep_forever()
        raise AssertionError(text)


@pytest.mark.parametrize("others", [["two", "three"], [None, None]], ids=["complete", "failed"])
async def test_pending_decision_is_cancelled_when_no_other_answer_can_come(
    others: list[str | None],
) -> None:
    agents = members("one", *others)
    for member in agents if others[0] is None else ():
        member.agent._fail(RuntimeError("gone"))
    with anyio.fail_after(10):
        cluster = await run_cluster(agents, EarlyExit(EndlessEmbedder()))
    assert [member.used for member in agents] == [True, *(text is not None for text in others)]
    assert not cluster.decisions


async def test_a_pending_decision_does_not_keep_the_next_answer_from_streaming() -> None:
    agents = members("one", None, None)
    async with anyio.create_task_group() as group:
        group.start_soon(run_cluster, agents, EarlyExit(EndlessEmbedder()))
        agents[1].agent._write("two")
        await anyio.wait_all_tasks_blocked()
        assert agents[0].slots[0].text.is_complete
        assert agents[1].slots[0].text.written == "two"
        group.cancel_scope.cancel()


async def test_quorum_leaves_out_the_others_once_its_time_is_over() -> None:
    agents = members("one", "two", None)
    agents[0].agent.asked.set()
    with anyio.fail_after(10):
        await run_cluster(agents, None, Quorum(2, 0.0))
    assert [member.used for member in agents] == [True, True, False]
    assert await agents[2].slots[0].text == ""
    assert not agents[2].agent.record.problem


async def test_an_agent_for_which_another_cluster_waits_is_not_cancelled() -> None:
    agents = members("one", None)
    Cluster([Member(agents[1].agent, [])], anyio.sleep_forever)
    agents[0].agent.asked.set()
    with anyio.fail_after(10):
        await run_cluster(agents, None, Quorum(1, 0.0))
    assert agents[1].used is False and not agents[1].agent.is_over


async def test_quorum_waits_until_enough_answers_are_complete() -> None:
    agents = members("one", None, None)
    agents[2].agent.asked.set()
    async with anyio.create_task_group() as group:
        group.start_soon(run_cluster, agents, None, Quorum(2, 0.0))
        await anyio.wait_all_tasks_blocked()
        assert [member.used for member in agents] == [True, None, None]
        agents[1].agent._write("two")
        agents[1].agent._close()
    assert [member.used for member in agents] == [True, True, False]


async def test_answers_are_copied_before_their_room_is_known() -> None:
    agents, known = members("one", None), anyio.Event()

    async def room() -> None:
        await known.wait()

    cluster = Cluster(agents, find_room=room)
    async with anyio.create_task_group() as group:
        group.start_soon(cluster.run)
        agents[1].agent._write("two")
        await anyio.wait_all_tasks_blocked()
        assert [member.slots[0].text.written for member in agents] == ["one", "two"]
        assert not any(member.slots[0].text.is_over for member in agents)
        agents[1].agent._close()
        known.set()
    assert all(member.slots[0].text.is_complete for member in agents)


async def test_answers_do_not_wait_for_an_engine_that_does_not_tell_its_room() -> None:
    agents = members("one", "two")
    cluster = Cluster(agents, find_room=anyio.sleep_forever, room_timeout=0.01)
    with anyio.fail_after(10):
        await cluster.run()
    assert [await member.slots[0].text for member in agents] == ["one", "two"]
