"""Agents whose tools run: their own next request is prefilled meanwhile, and answered the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import anyio
import pytest
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool

from flashmoa.autogen import link
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFinished, LinkOpened
from tests.integration.autogen.exactness import count_outcomes, finished_calls
from tests.integration.autogen.teams import agent
from tests.integration.autogen.tool_runs import Client, RequiringClient, Watch, make, run_both_ways
from tests.integration.scripted import call_until, script
from tests.integration.support import LAG, fetch_kv_state, generate, slow, wait_until_idle

pytestmark = pytest.mark.anyio
# How many tokens may be left for a request of which all but a short result was known.
FEW = LAG + 64


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = make(engine)
    await client.engine.flush_cache()
    yield client
    await wait_until_idle(client.engine)
    await client.close()


LOOK = ("look", {"place": "lake"})
NEXT_TURNS = {
    "iterates": {"max_tool_iterations": 3},
    "reflects": {"reflect_on_tool_use": True},
    "streams": {"max_tool_iterations": 3, "model_client_stream": True},
}


@pytest.mark.parametrize("way", NEXT_TURNS)
async def test_a_request_after_a_tool_was_prefilled_while_the_tool_ran(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script(monkeypatch, call_until(1, LOOK))

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: str) -> str:
            """Look at a place."""
            await watch.prefilled()
            return f"A fine {place}."

        options = {"system_message": guide[:3000], "tools": [look], **NEXT_TURNS[way]}
        members = [agent(model_client, "one", **options), agent(model_client, "two")]
        return RoundRobinGroupChat(members, max_turns=2)

    calls, watch = await run_both_ways(model_client, build)
    assert [call.agent for call in calls] == ["one", "one", "two"]
    assert [call.status for call in calls[1:]] == ["hit", "hit"]
    count_outcomes("own turns", calls[1:2])
    assert calls[1].late_tokens is not None and calls[1].late_tokens < FEW
    (opened,) = watch.own_links
    assert (opened.agent, opened.upstream) == ("one", ("look()",))
    assert watch.reasons([opened]) == ["used"]


async def test_what_is_held_stays_in_a_pool_that_others_fill(
    model_client: Client,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    words: Callable[[int, int], str],
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

        one = agent(
            model_client,
            "one",
            system_message=guide[:3000],
            tools=[look],
            max_tool_iterations=2,
        )
        return RoundRobinGroupChat([one], max_turns=1)

    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit"]
    assert calls[1].late_tokens is not None and calls[1].late_tokens < FEW
    unlinked = [event.usage for event in watch.unlinked if isinstance(event, CallFinished)]
    assert unlinked[1] is not None
    assert unlinked[1].prompt_tokens - (unlinked[1].cached_tokens or 0) > 600


async def test_what_is_cached_is_held_while_others_decode(
    model_client: Client,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    words: Callable[[int, int], str],
) -> None:
    """Streams do not stop decodes for a forward of their own."""
    script(monkeypatch, call_until(1, LOOK))
    watch = Watch(model_client, is_linked=True)
    ended: list[str] = []

    async def decode() -> None:
        await generate(model_client.engine, words(50, 9), 4000)
        ended.append("decodes")

    async def look(place: str) -> str:
        """Look at a place."""
        await watch.prefilled()
        ended.append("tool")
        return f"A fine {place}."

    options = {"system_message": guide[:3000], "tools": [look], "max_tool_iterations": 2}
    team = RoundRobinGroupChat([agent(model_client, "one", **options)], max_turns=1)
    linked = link(team, listener=watch.events.append)
    async with anyio.create_task_group() as group:
        group.start_soon(decode)
        with anyio.fail_after(20):
            while not (await fetch_kv_state(model_client.engine)).protected:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await team.run(task="Go.")
        group.cancel_scope.cancel()
    await linked.close()
    assert ended[0] == "tool"
    assert [call.status for call in finished_calls(watch.events)] == [None, "hit"]


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

        one = agent(model_client, "one", tools=[look, walk], max_tool_iterations=2)
        return RoundRobinGroupChat([one], max_turns=1)

    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit"]
    assert calls[1].late_tokens is not None and calls[1].late_tokens < FEW
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

        options = {"max_tool_iterations": 2, "reflect_on_tool_use": True}
        return RoundRobinGroupChat(
            [agent(model_client, "one", tools=[look], **options)], max_turns=1
        )

    # After the second call of its tool it may not call a third time, and reflects.
    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit", "hit"]
    assert watch.reasons(watch.own_links) == ["used", "used"]


async def test_nothing_is_held_if_the_agent_will_not_ask_again(
    model_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(9, LOOK))

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: str) -> str:
            """Look at a place."""
            # The reader of the result has its link before; that of its caller would come now.
            await watch.until(lambda: any(isinstance(e, LinkOpened) for e in watch.events))
            await anyio.sleep(0.05)
            return f"A fine {place}."

        members = [agent(model_client, "one", tools=[look]), agent(model_client, "two")]
        return RoundRobinGroupChat(members, max_turns=2)

    calls, watch = await run_both_ways(model_client, build)
    assert [call.status for call in calls] == [None, "hit"]
    assert not watch.own_links


@pytest.mark.parametrize("says", ["", "Let me look there first.", slow("  \n")])
async def test_the_text_before_a_tool_call_is_taken_back(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    script(monkeypatch, call_until(1, [says, LOOK] if says else LOOK))

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: str) -> str:
            """Look at a place."""
            await watch.prefilled()
            return f"A fine {place}."

        streaming = {"max_tool_iterations": 2, "model_client_stream": True}
        members = [
            agent(model_client, "one", tools=[look], **streaming),
            agent(model_client, "two", system_message=guide[:2000]),
        ]
        return RoundRobinGroupChat(members, max_turns=2)

    calls, watch = await run_both_ways(model_client, build)
    assert [(call.agent, call.status) for call in calls[1:]] == [("one", "hit"), ("two", "hit")]
    # The reader got the final answer as it was written, although it comes from an agent with tools.
    assert calls[2].late_tokens is not None and calls[2].late_tokens < FEW
    to_reader = [e for e in watch.events if isinstance(e, LinkOpened) and e.agent == "two"]
    assert watch.reasons(to_reader) == (["abort", "used"] if says else ["used"])


async def test_a_tool_call_that_the_engine_parsed_is_predicted(engine: LocalEngine) -> None:
    client = make(engine, RequiringClient, max_tokens=100, extra_body={})

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: bool) -> str:
            await watch.prefilled()
            return f"A fine place: {place}."

        tool = FunctionTool(look, name="look", description="looks")
        one = agent(client, "one", tools=[tool], reflect_on_tool_use=True)
        return RoundRobinGroupChat([one], max_turns=1)

    calls, _ = await run_both_ways(client, build)
    assert [call.status for call in calls] == [None, "hit"]
    await client.close()


async def test_an_agent_that_is_a_tool_does_not_use_its_callers_link(
    model_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(1, ("inner", {"task": "Look."})))

    def build(_: Watch) -> BaseGroupChat:
        inner = AgentTool(agent(model_client, "inner"))
        one = agent(model_client, "one", tools=[inner], reflect_on_tool_use=True)
        return RoundRobinGroupChat([one], max_turns=1)

    calls, watch = await run_both_ways(model_client, build)
    assert [(call.agent, call.status) for call in calls] == [("one", None), ("one", "hit")]
    assert watch.reasons(watch.own_links) == ["used"]


async def test_a_tool_that_asks_the_model_does_not_use_its_agents_link(
    model_client: Client, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(1, LOOK))

    def build(watch: Watch) -> BaseGroupChat:
        async def look(place: str) -> str:
            """Look at a place."""
            await watch.prefilled()
            question = UserMessage(content=f"Which {place}?", source="user")
            return str((await model_client.create([question])).content)

        options = {"system_message": guide[:3000], "tools": [look], "reflect_on_tool_use": True}
        return RoundRobinGroupChat([agent(model_client, "one", **options)], max_turns=1)

    calls, watch = await run_both_ways(model_client, build)
    assert [(call.agent, call.status) for call in calls] == [("one", None), ("one", "hit")]
    assert watch.reasons(watch.own_links) == ["used"]
