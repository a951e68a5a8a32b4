"""Agents whose tools run: their own next request is prefilled meanwhile, and answered the same."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.models import CreateResult
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolResult

from flashmoa.autogen import link
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import LinkOpened
from tests.integration.frameworks.autogen.runs import (
    Client,
    FinishedCall,
    connected,
    events_of,
    make,
    run_once,
    run_team,
)
from tests.integration.frameworks.autogen.teams import agent
from tests.integration.scripted import LinkWatch, call_until, script
from tests.integration.support import (
    Words,
    fetch_kv_state,
    generate,
    slow,
    wait_until_idle,
)
from tests.waiting import LAG

# Most tokens left to compute for a request, if only a short result in it was not known before.
FEW = LAG + 64
LOOK = ("look", {"place": "lake"})


class Watch(LinkWatch):
    """Makes the agents and teams whose tools wait."""

    def __init__(self, client: Client, *, is_linked: bool = True) -> None:
        super().__init__(client.engine, is_linked=is_linked)
        # The calls of the same team, unlinked.
        self.unlinked: list[FinishedCall] = []
        self.client = client

    async def look(self, place: str) -> str:
        """Look at a place."""
        await self.prefilled()
        return f"A fine {place}."

    def member(self, **options: Any) -> Any:
        """Make an agent that calls tools, by default ``look``."""
        return agent(self.client, "one", **{"tools": [self.look], **options})

    def alone(self, **options: Any) -> BaseGroupChat:
        return RoundRobinGroupChat([self.member(**options)], max_turns=1)

    def read(self, **options: Any) -> BaseGroupChat:
        """Make a team whose second agent reads the text of the agent with tools."""
        members = [self.member(**options), agent(self.client, "two")]
        return RoundRobinGroupChat(members, max_turns=2)


async def run_both_ways(
    client: Client, build: Callable[[Watch], BaseGroupChat]
) -> tuple[list[FinishedCall], Watch]:
    """Run a team linked and unlinked; its messages must be the same.

    Return the linked team's calls, and its watch.
    """
    watch = Watch(client)
    linked = await run_once(lambda: build(watch), [client], "Go.", events=watch.events)
    await wait_until_idle(client.engine)
    unlinked = Watch(client, is_linked=False)
    plain = await run_once(lambda: build(unlinked), [client], "Go.", "unlinked")
    assert linked.messages == plain.messages
    watch.unlinked = plain.calls
    return linked.calls, watch


WAYS = {
    "iterates": {"max_tool_iterations": 3},
    "reflects": {"reflect_on_tool_use": True},
    "streams": {"max_tool_iterations": 3, "model_client_stream": True},
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_after_a_tool_was_prefilled_while_the_tool_ran(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script(monkeypatch, call_until(1, LOOK))
    calls, watch = await run_both_ways(
        model_client, lambda watch: watch.read(system_message=guide[:3000], **WAYS[way])
    )
    assert [call.agent for call in calls] == ["one", "one", "two"]
    assert [call.status for call in calls[1:]] == ["hit", "hit"]
    assert calls[1].late_tokens < FEW
    (opened,) = watch.own_links
    assert (opened.agent, opened.upstream) == ("one", ("look()",))
    assert watch.reasons([opened]) == ["used"]


async def test_what_is_held_stays_in_a_pool_that_others_fill(
    model_client: Client,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    words: Words,
) -> None:
    script(monkeypatch, call_until(1, LOOK))

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: str) -> str:
            """Look at a place."""
            await watch.prefilled()
            for seed in range(5):
                # The pool has room for four of them.
                await generate(model_client.engine, words(3000, seed), 1)
            return f"A fine {place}."

        return watch.alone(system_message=guide[:3000], tools=[look], max_tool_iterations=2)

    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit"]
    assert calls[1].late_tokens < FEW
    usage = watch.unlinked[1].usage
    assert usage is not None and usage.prompt_tokens - (usage.cached_tokens or 0) > 600


async def test_what_is_cached_is_held_while_others_decode(
    model_client: Client,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    words: Words,
) -> None:
    """Streams do not stop decodes for a forward of their own."""
    script(monkeypatch, call_until(1, LOOK))
    watch = Watch(model_client)
    ended: list[str] = []

    async def decode() -> None:
        await generate(model_client.engine, words(50, 9), 4000)
        ended.append("decodes")

    async def look(place: str) -> str:
        """Look at a place."""
        text = await watch.look(place)
        ended.append("tool")
        return text

    team = watch.alone(system_message=guide[:3000], tools=[look], max_tool_iterations=2)
    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        with anyio.fail_after(20):
            while not (await fetch_kv_state(model_client.engine)).protected:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        run = await run_team(team, "Go.", events=watch.events)
        group.cancel_scope.cancel()
    assert ended[0] == "tool"
    assert [call.status for call in run.calls] == [None, "hit"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_result_is_prefilled_while_the_next_tool_runs(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    script(monkeypatch, call_until(1, [LOOK, ("walk", {})]))
    long = guide[:2500]

    def build(watch: Watch) -> BaseGroupChat:
        known: list[int] = []

        async def look(place: str) -> str:
            """Look at a place."""
            known.append(await watch.prefilled())
            if fails:
                raise ValueError(long)
            return long

        async def walk() -> str:
            """Walk."""
            await watch.until(lambda: bool(known))
            await watch.prefilled(sum(known) + len(long) // 5)
            return "Walked."

        return watch.alone(tools=[look, walk], max_tool_iterations=2)

    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit"]
    assert calls[1].late_tokens < FEW
    assert [opened.upstream for opened in watch.own_links] == [("look()", "walk()")]


async def test_each_of_several_iterations_is_prefilled(
    model_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(3, LOOK))

    def build(watch: Watch) -> BaseGroupChat:
        looks = 0

        async def look(place: str) -> str:
            """Look at a place."""
            nonlocal looks
            looks += 1
            await watch.prefilled(links=looks)
            return f"{place} {looks}"

        return watch.alone(tools=[look], max_tool_iterations=2, reflect_on_tool_use=True)

    # After the second call of its tool it may not call a third time, and reflects.
    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit", "hit"]
    assert watch.reasons(watch.own_links) == ["used", "used"]


@pytest.mark.parametrize("way", ["streams", "iterates"])
@pytest.mark.parametrize("says", ["Let me look there first.", slow("  \n")])
async def test_the_text_before_a_tool_call_is_taken_back(
    model_client: Client, monkeypatch: pytest.MonkeyPatch, says: str, way: str
) -> None:
    script(monkeypatch, call_until(1, [says, LOOK]))
    calls, watch = await run_both_ways(model_client, lambda watch: watch.read(**WAYS[way]))
    assert [(call.agent, call.status) for call in calls[1:]] == [("one", "hit"), ("two", "hit")]
    # The reader got the final answer as it was written, although it comes from an agent with tools.
    assert calls[2].late_tokens < FEW
    to_reader = events_of(watch.events, LinkOpened, "two")
    assert watch.reasons(to_reader) == ["used"]


class RequiringClient(Client):
    """Lets the engine's grammar force a call of a tool where there are tools."""

    async def create(self, messages: Any, *, tools: Any = (), **more: Any) -> CreateResult:  # type: ignore[override]
        if tools:
            more["tool_choice"] = "required"
            more["extra_create_args"] = {"parallel_tool_calls": False}
        return await super().create(messages, tools=tools, **more)


async def test_a_tool_call_that_the_engine_parsed_is_predicted(engine: LocalEngine) -> None:
    client = make(engine, RequiringClient, max_tokens=100, extra_body={})

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: bool) -> str:
            return await watch.look(str(place))

        tool = FunctionTool(look, name="look", description="looks")
        return watch.alone(tools=[tool], reflect_on_tool_use=True)

    calls, _ = await run_both_ways(client, build)
    assert [call.status for call in calls] == [None, "hit"]
    await client.close()


@pytest.mark.parametrize("how", ["cancelled", "fails", "closed"])
async def test_what_is_held_is_given_back_if_the_request_does_not_come(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    script(monkeypatch, call_until(1, LOOK))
    # AutoGen waits for ever for a tool that is cancelled or raises. In an event loop of its own,
    # the tasks that AutoGen leaves end with the loop.
    play = partial(asyncio.run, asyncio.wait_for(lose_request(engine, how), 60))
    reasons = await anyio.to_thread.run_sync(play)
    assert reasons == ["closed" if how == "closed" else "abort"]


async def lose_request(engine: LocalEngine, how: str) -> list[str]:
    """Run a team whose agent does not get the result of its tool, and so does not ask again.

    Return why the link to its request was closed, before the team has ended.
    """
    async with connected(engine) as (client,):
        watch, token = Watch(client), CancellationToken()

        async def look(place: str) -> str:
            return await anyio.sleep_forever() or place

        class BrokenBench(StaticWorkbench):
            async def call_tool(self, *_: Any, **__: Any) -> ToolResult:
                await watch.prefilled()
                raise RuntimeError("The workbench is broken.")

        tools = [FunctionTool(look, description="")]
        given = {"workbench": BrokenBench(tools), "tools": None} if how == "fails" else {}
        team = watch.alone(max_tool_iterations=2, **{"tools": tools, **given})
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
        return watch.reasons(watch.own_links)
