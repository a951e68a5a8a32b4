"""Agents whose tools run: their own next request is prefilled meanwhile, and answered the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from autogen_agentchat.base import TaskResult
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken
from autogen_core.models import CreateResult
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolResult

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.autogen import watch as report_calls
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFinished, Event, LinkClosed, LinkOpened
from tests.integration.autogen.exactness import CallOutcome, count_outcomes, finished_calls
from tests.integration.autogen.scripted import Answer, script
from tests.integration.autogen.teams import agent
from tests.integration.support import LAG, fetch_kv_state, generate, slow, wait_until_idle

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient
# How many tokens may be left for a request of which all but a short result was known.
FEW = LAG + 64


class RequiringClient(Client):
    """Lets the engine's grammar force a call of a tool where there are tools."""

    async def create(self, messages: Any, *, tools: Any = (), **more: Any) -> CreateResult:  # type: ignore[override]
        if tools:
            more["tool_choice"] = "required"
            more["extra_create_args"] = {"parallel_tool_calls": False}
        return await super().create(messages, tools=tools, **more)


def make(engine: LocalEngine, kind: type[Client] = Client, **more: Any) -> Client:
    settings = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}, **more}
    return kind(model="tiny", base_url=engine.url, **settings)


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = make(engine)
    await client.engine.flush_cache()
    yield client
    await wait_until_idle(client.engine)
    await client.close()


class Watch:
    """Lets the tools of a linked team wait for what becomes of its links.

    In an unlinked team, nothing is waited for.
    """

    def __init__(self, client: Client, *, is_linked: bool) -> None:
        self.events: list[Event] = []
        # The events of the same team, unlinked.
        self.unlinked: list[Event] = []
        self.client = client
        self.is_linked = is_linked

    @property
    def own_links(self) -> list[LinkOpened]:
        """The links to what agents ask after their tools."""
        opened = [event for event in self.events if isinstance(event, LinkOpened)]
        return [event for event in opened if event.upstream and event.upstream[0].endswith(")")]

    def reasons(self, links: list[LinkOpened]) -> list[str]:
        """Return why these links were closed."""
        ids = [opened.stream_id for opened in links]
        closed = [event for event in self.events if isinstance(event, LinkClosed)]
        return [event.reason for event in closed if event.stream_id in ids]

    async def until(self, is_so: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while self.is_linked and not is_so():  # noqa: ASYNC110
                await anyio.sleep(0.002)

    async def prefilled(self, tokens: int = 0, links: int = 1) -> int:
        """Wait until the latest link to an own request has KV for nearly all that is certain.

        Args:
            tokens: at least how many tokens are certain.
            links: which one it is.

        Return the number of tokens that are certain.
        """
        await self.until(lambda: len(self.own_links) >= links)
        with anyio.fail_after(20):
            while self.is_linked:
                state = await self.client.engine.stream_state(self.own_links[-1].stream_id)
                if tokens <= state.received_tokens <= state.prefilled_tokens + LAG:
                    return state.received_tokens
                await anyio.sleep(0.002)
        return 0


def messages_of(result: TaskResult) -> list[tuple[str, str]]:
    """Return the messages without the ids of calls, which engines choose at random."""
    texts = [(message.source, message.to_text()) for message in result.messages]
    return [(source, re.sub("call_[0-9a-f]+", "", text)) for source, text in texts]


async def run_both_ways(
    client: Client, build: Callable[[Watch], BaseGroupChat]
) -> tuple[list[CallOutcome], Watch]:
    """Run a team linked and unlinked; its messages must be the same.

    Return the linked team's calls, and its watch.
    """
    watch = Watch(client, is_linked=True)
    await client.engine.flush_cache()
    team = build(watch)
    linked = link(team, listener=watch.events.append)
    messages = messages_of(await team.run(task="Go."))
    await linked.close()
    await wait_until_idle(client.engine)
    await client.engine.flush_cache()
    plain = build(Watch(client, is_linked=False))
    report_calls(plain, watch.unlinked.append)
    assert messages_of(await plain.run(task="Go.")) == messages
    return finished_calls(watch.events), watch


def tool_results(request: dict[str, Any]) -> list[str]:
    return [str(m["content"]) for m in request["messages"] if m["role"] == "tool"]


def call_until(results: int, answer: Answer) -> Callable[[dict[str, Any]], Answer | None]:
    """Script an agent with tools: it calls them until it has that many results."""

    def answer_to(request: dict[str, Any]) -> Answer | None:
        has_tools = bool(request.get("tools"))
        return answer if has_tools and len(tool_results(request)) < results else None

    return answer_to


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
