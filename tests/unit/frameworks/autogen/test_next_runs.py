"""Prefills for a team's next run are for teams that run again, not for one that is made once."""

from __future__ import annotations

from collections import Counter

import pytest

from flashmoa import EngineClient
from flashmoa.autogen import link
from flashmoa.observe import Event, LinkOpened
from tests.unit.frameworks.autogen.test_link import make_client, make_team
from tests.unit.openai.fake_server import serve
from tests.waiting import until


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kv_pool_tokens(_: EngineClient) -> int:
        return 10_000

    serve(monkeypatch)
    monkeypatch.setattr(EngineClient, "kv_pool_tokens", kv_pool_tokens)


def count(events: list[Event], kind: type[Event]) -> Counter[str]:
    return Counter(event.agent for event in events if isinstance(event, kind))


async def test_teams_that_run_once_leave_no_stream_open() -> None:
    """A server may make a team for each request."""
    client, events = make_client(), list[Event]()
    teams = [make_team(client, "one", "two") for _ in range(20)]
    links = [link(team, listener=events.append) for team in teams]
    for team in teams:
        await team.run(task="Go.")
    # A team's tasks end once the end of its run is noticed, unless a next one is waited for.
    await until(lambda: not any(each._planner.host._group_tasks for each in links))
    assert not count(events, LinkOpened)["one"]
    for each in links:
        await each.close()
    await client.close()


@pytest.mark.parametrize("pause", [False, True])
async def test_a_team_that_ran_twice_is_linked_for_the_next(pause: bool) -> None:
    """A run may also begin before the end of the one before it is noticed."""
    client, events = make_client(), list[Event]()
    team = make_team(client, "one", "two")
    linked = link(team, listener=events.append)
    await team.run(task="Go.")
    if pause:
        await until(lambda: not linked._planner.host._group_tasks)
    await team.run(task="Go on.")
    await until(lambda: count(events, LinkOpened)["one"])
    await linked.close()
    await client.close()
