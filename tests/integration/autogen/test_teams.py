"""Test every stock team linked on a real engine: prompts are predicted, answers are the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import pytest
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken

from flashmoa.autogen import link, watch
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event
from tests.integration.autogen.exactness import (
    CallOutcome,
    count_outcomes,
    finished_calls,
    mostly_hit,
)
from tests.integration.autogen.teams import (
    Build,
    Client,
    agent,
    bounded,
    chain,
    conditional,
    custom,
    cycle,
    fan,
    filtered_fan,
    nested,
    remembering,
    round_robin,
    selecting,
    society,
    streaming,
)
from tests.integration.support import slow, wait_until_idle

pytestmark = pytest.mark.anyio


@dataclass
class RunResult:
    """The messages of a run, with their sources, and the outcome of each call."""

    messages: list[tuple[str, str]]
    calls: list[CallOutcome]


async def run_team(
    client: Client, build: Build, task: str, linked: bool, include: Sequence[str] = ()
) -> RunResult:
    await client.engine.flush_cache()
    events: list[Event] = []
    team = build(client)
    running = watch(team, events.append)
    if linked:
        running = link(team, include=include, listener=events.append)
    result = await team.run(task=task)
    await running.close()
    messages = [(m.source, m.to_text()) for m in result.messages]
    return RunResult(messages, finished_calls(events))


async def answer(client: Client, messages: list[tuple[str, str]], name: str) -> tuple[str, str]:
    """Return an agent's answer to these messages, outside of any team."""
    given = [TextMessage(content=text, source=source) for source, text in messages]
    response = await agent(client, name).on_messages(given, CancellationToken())
    return name, response.chat_message.to_text()


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=40,
        extra_body={"ignore_eos": True},
    )
    yield client
    await client.close()


# ``unlinked``: the agent whose call comes first, so that nothing can be known of it before.
@pytest.mark.parametrize(
    ("build", "unlinked"),
    [
        (round_robin, "one"),
        slow(streaming, "one"),
        slow(bounded, "one"),
        slow(remembering, "one"),
        slow(chain, "one"),
        slow(fan, "chair"),
        (filtered_fan, "chair"),
        (conditional, "writer"),
        (cycle, "writer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_every_linkable_call_is_predicted_and_nothing_changes(
    model_client: Client, client: EngineClient, guide: str, build: Build, unlinked: str
) -> None:
    task = guide[:800]
    linked = await run_team(model_client, build, task, linked=True)
    plain = await run_team(model_client, build, task, linked=False)
    assert sorted(linked.messages[:-1]) == sorted(plain.messages[:-1])
    last = plain.messages[-1]
    if build is fan:  # The last agent reads the reviewers as they finish, which is a race.
        last = await answer(model_client, linked.messages[:-1], "meta")
    assert linked.messages[-1] == last
    first, *calls = linked.calls
    assert first.agent == unlinked and first.status is None
    count_outcomes(build.__name__, calls)
    assert {call.status for call in calls} <= {"hit", "late"}
    assert mostly_hit(calls)
    await wait_until_idle(client)


@pytest.mark.parametrize(
    ("build", "unlinked"),
    [
        (selecting, ["(manager)"]),
        slow(nested, ["one", "in1"]),
        slow(society, ["one", "in1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_teams_with_partly_unknown_messages_are_never_mispredicted(
    model_client: Client, client: EngineClient, guide: str, build: Build, unlinked: list[str]
) -> None:
    """Unknown are the first call, and the first call of a team within the team."""
    task = guide[:800]
    plain = await run_team(model_client, build, task, linked=False)
    linked = await run_team(model_client, build, task, linked=True)
    assert linked.messages == plain.messages
    calls = list(linked.calls)
    for name in unlinked:
        first = next(call for call in calls if call.agent == name)
        assert first.status is None
        calls.remove(first)
    count_outcomes(build.__name__, calls)
    assert {call.status for call in calls} <= {"hit", "late"}
    assert mostly_hit(calls)
    await wait_until_idle(client)


@pytest.mark.slow
@pytest.mark.parametrize("include", [(), ("mine",)])
async def test_custom_agents_are_linked_on_request(
    model_client: Client, client: EngineClient, guide: str, include: tuple[str, ...]
) -> None:
    task = guide[:800]
    plain = await run_team(model_client, custom, task, linked=False)
    linked = await run_team(model_client, custom, task, linked=True, include=include)
    assert linked.messages == plain.messages
    mine = [call for call in linked.calls if call.agent == "mine"]
    assert len(mine) == 2
    if include:
        count_outcomes("custom, included", linked.calls[1:])
        assert {call.status for call in linked.calls[1:]} <= {"hit", "late"}
        assert mostly_hit(linked.calls[1:])
    else:
        assert {call.status for call in mine} == {None}
    await wait_until_idle(client)


async def test_unknown_names_are_refused(model_client: Client) -> None:
    with pytest.raises(ValueError, match=r"include names \['four'\]; the team has"):
        link(round_robin(model_client), include=["four"])
    with pytest.raises(ValueError, match=r"on_failure names \['four'\]; the team has"):
        link(round_robin(model_client), on_failure={"four": "finalize"})
    with pytest.raises(ValueError, match="error must be 'abort' or 'finalize'"):
        link(round_robin(model_client), on_failure="ignore")  # type: ignore[arg-type]
