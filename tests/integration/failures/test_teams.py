"""Test linked teams when an agent, the team, its client or an engine fails."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken

from flashmoa.autogen import FlashMoAChatCompletionClient, TeamLink, link
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.link.failure_policy import Action, Failure
from flashmoa.observe import Event, LinkClosed
from tests.integration.baseline import Baseline
from tests.integration.failures.matrix import (
    PATIENCE,
    TEAM_CELLS,
    Make,
    check_nothing_is_left,
    is_linked,
    policy,
    reasons,
    reported_failures,
)
from tests.integration.faulty_proxy import FaultyProxy, start_faulty_proxy
from tests.integration.frameworks.autogen.runs import finished_calls
from tests.integration.support import start_special_engine
from tests.waiting import until

pytestmark = pytest.mark.slow
Client = FlashMoAChatCompletionClient


def make_team(
    writing: Client, reading: Client, task: str, *, stream: bool = True
) -> RoundRobinGroupChat:
    streamed = {"model_client_stream": stream}
    writer = AssistantAgent("writer", writing, system_message="Write.", **streamed)
    reviewer = AssistantAgent("reviewer", reading, system_message=task, **streamed)
    return RoundRobinGroupChat([writer, reviewer], max_turns=2)


class Pair:
    """Runs a task with a writer and a reviewer, linked."""

    def __init__(
        self, writing: Client, reading: Client, task: str, *, stream: bool = True, **linking: Any
    ) -> None:
        self.events: list[Event] = []
        self.clients = writing, reading
        self.team = make_team(writing, reading, task, stream=stream)
        self.linked: TeamLink = link(self.team, listener=self.events.append, **linking)
        self.token = CancellationToken()
        self.run: asyncio.Task[TaskResult] = asyncio.ensure_future(
            self.team.run(task=task, cancellation_token=self.token)
        )

    async def close(self) -> None:
        await self.linked.close()
        for client in self.clients:
            await client.close()

    async def outcome(self) -> str:
        """Return the outcome of the run, and how its reviewer was answered."""
        try:
            result = await self.run
        except asyncio.CancelledError:
            return "the team is cancelled"
        except Exception as error:
            return f"the team raises {type(error).__name__}"
        status = finished_calls(self.events)[-1].status
        return f"{len(result.messages)} messages, the last one {status or 'unlinked'}"

    def is_closed(self) -> bool:
        return any(isinstance(event, LinkClosed) for event in self.events)


async def texts(make: Make, engine: LocalEngine, downstream: LocalEngine, task: str) -> list[str]:
    """Return the texts of both agents, unlinked."""
    writing, reading = make(engine.url, 150), make(downstream.url)
    result = await make_team(writing, reading, task).run(task=task)
    for client in (writing, reading):
        await client.close()
    return [message.to_text() for message in result.messages]


@pytest.mark.parametrize(("failure", "action"), TEAM_CELLS)
async def test_a_failing_agent_follows_the_readers_policy(  # noqa: PLR0913 - fixtures
    upstream_proxy: FaultyProxy,
    engine: LocalEngine,
    downstream: LocalEngine,
    baselines: tuple[Baseline, Baseline],
    make: Make,
    guide: str,
    failure: Failure,
    action: Action,
) -> None:
    task = guide[:600]
    async with check_nothing_is_left(*baselines):
        upstream_proxy.arm("reset" if failure == "error" else "stall")
        writing = make(upstream_proxy.url, 150, timeout=PATIENCE if failure == "timeout" else 60.0)
        # One policy is set for the team, the other one for one agent.
        given = policy(failure, action)
        on_failure = given if action == "abort" else {"reviewer": given}
        pair = Pair(writing, make(downstream.url), task, on_failure=on_failure)
        await until(lambda: upstream_proxy.has_struck and is_linked(pair.events))
        if failure == "cancel":
            pair.token.cancel()
        if failure == "stall":
            await until(lambda: bool(reported_failures(pair.events)))
            upstream_proxy.release()
        await pair.outcome()
        if failure == "stall":
            plain = await texts(make, engine, downstream, task)
            assert [message.to_text() for message in pair.run.result().messages] == plain
        # The link closes by itself, before the team is closed.
        await until(pair.is_closed)
        await pair.close()
        upstream_proxy.release()
    assert reported_failures(pair.events) == [("writer", failure, action)]
    reading = [event for event in pair.events if event.agent == "reviewer"]
    finalized = "used" if failure == "stall" else "unused"
    assert reasons(reading) == ("abort" if action == "abort" else finalized)


async def test_a_retried_writer_keeps_its_links(
    upstream_proxy: FaultyProxy,
    engine: LocalEngine,
    downstream: LocalEngine,
    baselines: tuple[Baseline, Baseline],
    make: Make,
    guide: str,
) -> None:
    """OpenAI's client retries as in an unlinked team; its text is continued where it broke off."""
    task = guide[:600]
    plain = await texts(make, engine, downstream, task)
    async with check_nothing_is_left(*baselines):
        upstream_proxy.arm("reset")
        writing = make(upstream_proxy.url, 150, max_retries=2)
        # OpenAI's client repeats no stream that has begun.
        pair = Pair(writing, make(downstream.url), task, stream=False)
        outcome = await pair.outcome()
        assert upstream_proxy.has_struck
        assert [message.to_text() for message in pair.run.result().messages] == plain
        await pair.close()
    assert outcome == "3 messages, the last one hit"


@pytest.mark.parametrize("which", ["writer's", "reviewer's"])
async def test_closing_a_client_ends_its_links(
    upstream_proxy: FaultyProxy,
    downstream: LocalEngine,
    baselines: tuple[Baseline, Baseline],
    make: Make,
    guide: str,
    which: str,
) -> None:
    async with check_nothing_is_left(*baselines):
        upstream_proxy.arm("stall")
        pair = Pair(make(upstream_proxy.url, 150), make(downstream.url), guide[:600])
        await until(lambda: upstream_proxy.has_struck and is_linked(pair.events))
        await pair.clients[which == "reviewer's"].close()
        await until(pair.is_closed)
        upstream_proxy.release()
        await pair.outcome()
        await pair.close()
    assert reasons(pair.events) == "closed"


@pytest.fixture
async def mortal(engines: LocalEngines, model: Any) -> AsyncGenerator[LocalEngine]:
    """An engine that a test may kill."""
    one = await engines.start(model, core=1, arguments=["--max-total-tokens", "12000"])
    yield one
    await one.stop()


def kill(engine: LocalEngine) -> None:
    os.killpg(engine.pid, signal.SIGKILL)


async def test_a_killed_upstream_engine_fails_the_run_and_aborts_the_link(
    mortal: LocalEngine,
    downstream: LocalEngine,
    baselines: tuple[Baseline, Baseline],
    make: Make,
    guide: str,
) -> None:
    async with check_nothing_is_left(*baselines):
        pair = Pair(make(mortal.url, 4000), make(downstream.url), guide[:600])
        await until(lambda: is_linked(pair.events))
        kill(mortal)
        outcome = await pair.outcome()
        await until(pair.is_closed)
        await pair.close()
    assert reasons(pair.events) == "abort"
    assert outcome.startswith("the team raises")


async def test_a_restarted_downstream_engine_answers_unlinked(  # noqa: PLR0913 - fixtures
    upstream_proxy: FaultyProxy,
    engine: LocalEngine,
    downstream: LocalEngine,
    engines: LocalEngines,
    mortal: LocalEngine,
    model: Any,
    baselines: tuple[Baseline, Baseline],
    make: Make,
    guide: str,
) -> None:
    task = guide[:600]
    plain = await texts(make, engine, downstream, task)
    async with (
        start_special_engine(engines, model) as fresh,
        start_faulty_proxy(mortal.url) as address,
        check_nothing_is_left(*baselines),
    ):
        upstream_proxy.arm("stall")
        pair = Pair(make(upstream_proxy.url, 150), make(address.url), task)
        await until(lambda: upstream_proxy.has_struck and is_linked(pair.events))
        kill(mortal)
        address.target = fresh.url
        upstream_proxy.release()
        outcome = await pair.outcome()
        assert [message.to_text() for message in pair.run.result().messages] == plain
        await pair.close()
    assert outcome.endswith("unlinked")
    # The engine is either down, or up again without the stream.
    assert reasons(pair.events).startswith(("EngineUnreachable", "StreamUnknown"))
