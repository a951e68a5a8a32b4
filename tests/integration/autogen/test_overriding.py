"""Linking runs no user-defined code unless the user includes it, and so changes no answer."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from flashmoa.autogen import link, watch
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event
from tests.integration.autogen import overriding
from tests.integration.autogen.exactness import CallOutcome, finished_calls, mostly_hit
from tests.integration.autogen.overriding import Build
from tests.integration.autogen.teams import Client
from tests.integration.support import wait_until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@dataclass
class RunResult:
    """The messages, the outcome of each call, and how often the user-defined method ran."""

    messages: list[tuple[str, str]]
    calls: list[CallOutcome]
    runs: int


async def run_team(
    client: Client, build: Build, task: str, linked: bool, *include: str
) -> RunResult:
    await client.engine.flush_cache()
    events: list[Event] = []
    numbers = itertools.count(1)
    team = build(client, lambda: next(numbers))
    running = watch(team, events.append)
    if linked:
        running = link(team, include=include, listener=events.append)
    result = await team.run(task=task)
    await running.close()
    messages = [(m.source, m.to_text()) for m in result.messages]
    return RunResult(messages, finished_calls(events), next(numbers) - 1)


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=20,
        extra_body={"ignore_eos": True},
    )
    yield client
    await wait_until_idle(client.engine)
    await client.close()


@pytest.mark.parametrize(
    "build",
    [
        overriding.workbench,
        overriding.workbench_of_one,
        overriding.tool,
        overriding.stream,
        overriding.stream_of_one,
        overriding.adding,
        overriding.calling,
        overriding.filtering,
        overriding.society,
        overriding.context,
        overriding.memory,
        overriding.message,
        overriding.manager,
        overriding.client,
    ],
    ids=lambda build: build.__name__,
)
async def test_overriding_code_runs_as_often_as_unlinked(
    model_client: Client, guide: str, build: Build
) -> None:
    plain = await run_team(model_client, build, guide[:600], linked=False)
    linked = await run_team(model_client, build, guide[:600], linked=True)
    assert plain.runs == linked.runs > 0
    assert linked.messages == plain.messages
    assert {call.status for call in linked.calls} <= {None, "hit", "late"}
    assert "hit" in {call.status for call in linked.calls} or build is overriding.manager


@pytest.mark.parametrize(
    "build", [overriding.stream, overriding.workbench_of_one], ids=lambda build: build.__name__
)
async def test_included_agents_with_overriding_code_are_linked(
    model_client: Client, guide: str, build: Build
) -> None:
    plain = await run_team(model_client, build, guide[:600], linked=False)
    linked = await run_team(model_client, build, guide[:600], True, "two")
    assert linked.messages == plain.messages
    assert linked.runs > plain.runs
    first, *calls = linked.calls
    assert first.status is None
    assert {call.status for call in calls} <= {"hit", "late"} and mostly_hit(calls)
