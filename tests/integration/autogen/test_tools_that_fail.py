"""Agents whose tools fail, or are cancelled: what was held for them is given back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anyio
import pytest
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolResult

from flashmoa.autogen import link
from flashmoa.engine.local import LocalEngine
from tests.integration.autogen.teams import agent
from tests.integration.autogen.tool_runs import Watch, make
from tests.integration.scripted import call_until, script
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
LOOK = ("look", {"place": "lake"})


@pytest.mark.parametrize("how", ["cancelled", "fails", "closed"])
async def test_what_is_held_is_given_back_if_the_request_does_not_come(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    script(monkeypatch, call_until(1, LOOK))
    # AutoGen waits for ever for a tool that is cancelled or raises. In an event loop of its own,
    # what it leaves ends with the loop.
    play = partial(asyncio.run, asyncio.wait_for(lose_request(engine, how), 60))
    reasons = await anyio.to_thread.run_sync(play)
    assert reasons == ["closed" if how == "closed" else "abort"]


async def lose_request(engine: LocalEngine, how: str) -> list[str]:
    """Run a team whose agent does not get the result of its tool, and so does not ask again.

    Return why the link to its request was closed, before the team has ended.
    """
    client, token = make(engine), CancellationToken()
    watch = Watch(client, is_linked=True)

    async def look(place: str) -> str:
        return await anyio.sleep_forever() or place

    class BrokenBench(StaticWorkbench):
        async def call_tool(self, *_: Any, **__: Any) -> ToolResult:
            await watch.prefilled()
            raise RuntimeError("The workbench is broken.")

    tools = [FunctionTool(look, description="")]
    given = {"workbench": BrokenBench(tools)} if how == "fails" else {"tools": tools}
    one = agent(client, "one", max_tool_iterations=2, **given)
    team = RoundRobinGroupChat([one], max_turns=1)
    linked = link(team, listener=watch.events.append)
    run = asyncio.create_task(team.run(task="Go.", cancellation_token=token))
    await watch.until(lambda: bool(watch.own_links))
    if how == "cancelled":
        token.cancel()
    elif how == "closed":
        await linked.close()
    await watch.until(lambda: bool(watch.reasons(watch.own_links)))
    await wait_until_idle(client.engine)
    assert not run.done()
    token.cancel()
    while not run.done():
        run.cancel()
        await asyncio.sleep(0.01)
    await linked.close()
    await client.close()
    return watch.reasons(watch.own_links)
