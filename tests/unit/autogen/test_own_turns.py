"""What an agent asks when its tools have run is predicted as AutoGen asks it; without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    ChatCompletionContext,
    HeadAndTailChatCompletionContext,
    TokenLimitedChatCompletionContext,
    UnboundedChatCompletionContext,
)
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolResult, ToolSchema
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoa.autogen._own_turns import OwnRequest, find_tool_tasks, result_of
from flashmoa.autogen._self_hosted import render
from flashmoa.linking.forecasts import RequestAfterTools
from tests.unit.autogen.scripted_agents import (
    ScriptedClient,
    called,
    look,
    make_agent,
    scripted,
    take_turn,
    walk,
)

pytestmark = pytest.mark.anyio

CONTEXTS = (
    UnboundedChatCompletionContext,
    lambda: BufferedChatCompletionContext(2),
    lambda: HeadAndTailChatCompletionContext(1, 1),
)
one_call = st.one_of(
    st.tuples(st.just("look"), st.fixed_dictionaries({"place": st.text()})),
    st.tuples(st.just("walk"), st.fixed_dictionaries({"hours": st.integers(0, 12)})),
    st.tuples(st.just("walk"), st.just("no object")),
    st.tuples(st.just("fly"), st.just({})),
)


@settings(max_examples=60)
@given(
    script=st.lists(st.lists(one_call, min_size=1, max_size=3), min_size=1, max_size=3),
    iterations=st.integers(1, 3),
    reflects=st.booleans(),
    streams=st.booleans(),
    thought=st.sampled_from([None, "Hm.\n"]),
    context=st.sampled_from(CONTEXTS),
)
def test_every_request_after_tools_is_predicted_exactly(
    script: list[list[tuple[str, object]]],
    iterations: int,
    reflects: bool,
    streams: bool,
    thought: str | None,
    context: Any,
) -> None:
    async def check() -> None:
        client = scripted([called(*calls) for calls in script], thought)
        agent = make_agent(
            client,
            max_tool_iterations=iterations,
            reflect_on_tool_use=reflects,
            model_client_stream=streams,
            model_context=context(),
        )
        try:
            await take_turn(agent)
        except RuntimeError as error:
            # A reflection that is answered by further calls.
            assert "no valid text" in str(error)
        await client.finished()
        predicted = [each for each in client.predictions if each is not None]
        # An answer to a reflection is predicted like any other, but nobody asks for it.
        assert len(predicted) >= len(client.prompts) - 1
        for number, (request, prompt) in enumerate(
            zip(predicted, client.prompts[1:], strict=False), start=1
        ):
            await check_request(client, request, number, prompt)

    asyncio.run(check())


async def check_request(
    client: ScriptedClient, request: OwnRequest, number: int, prompt: str
) -> None:
    """Check that a prompt was predicted, step by step as the results were learned."""

    async def rendered(results: Mapping[str, str]) -> str:
        call = await request.dry_run([results[tool] for tool in request.tools])
        return await render(client, call.messages, call.tools)

    held = RequestAfterTools("one", client.engine, request.tools, rendered)
    certain = (await (await held.forecast(held.turn)).prompt()).stable()
    assert prompt.startswith(certain)
    for place, tool in enumerate(request.tools):
        learned = client.learned.get((number, place))
        # AutoGen refuses some calls at once, without running anything.
        if learned is None:
            return
        held.results[tool] = learned
        more = (await (await held.forecast(held.turn)).prompt()).stable()
        assert more.startswith(certain) and prompt.startswith(more)
        certain = more
    assert certain == prompt


@pytest.mark.parametrize(
    ("options", "predicted"),
    [
        ({}, [False]),
        ({"reflect_on_tool_use": True}, [True]),
        ({"max_tool_iterations": 2}, [True, False]),
        ({"max_tool_iterations": 2, "reflect_on_tool_use": True}, [True, True]),
    ],
    ids=str,
)
async def test_only_a_request_that_will_come_is_predicted(
    options: dict[str, Any], predicted: list[bool]
) -> None:
    look_once = called(("look", {"place": "lake"}))
    client = scripted([look_once] * len(predicted))
    await take_turn(make_agent(client, **options))
    await client.finished()
    assert [each is not None for each in client.predictions] == predicted
    assert len(client.prompts) == 1 + sum(predicted)


async def test_after_a_handoff_nothing_is_asked() -> None:
    client = scripted([called(("look", {"place": "lake"}), ("transfer_to_two", {}))])
    await take_turn(make_agent(client, handoffs=["two"], max_tool_iterations=3))
    await client.finished()
    assert client.predictions == [None]


async def test_a_context_that_counts_tokens_is_not_predicted() -> None:
    client = scripted([called(("look", {"place": "lake"}))])
    client.count_tokens = lambda *_, **__: 1  # type: ignore[method-assign]
    context: ChatCompletionContext = TokenLimitedChatCompletionContext(client, token_limit=1000)
    await take_turn(make_agent(client, model_context=context, max_tool_iterations=2))
    await client.finished()
    assert not client.predictions and "TokenLimited" in client.problems[0]


async def test_a_workbench_is_not_asked_for_its_tools_once_more() -> None:
    asked = 0

    class Bench(StaticWorkbench):
        async def list_tools(self) -> list[ToolSchema]:
            nonlocal asked
            asked += 1
            return await super().list_tools()

    client = scripted([called(("look", {"place": "lake"}))])
    bench = Bench([FunctionTool(look, description="Looks.", name="look")])
    agent = make_agent(client, tools=None, workbench=bench, max_tool_iterations=2)
    await take_turn(agent)
    await client.finished()
    before = asked
    (request, *_) = client.predictions
    assert request is not None
    call = await request.dry_run(["lake"])
    assert await render(client, call.messages, call.tools) == client.prompts[1]
    assert asked == before


async def test_results_are_learned_as_each_tool_ends() -> None:
    may_end = asyncio.Event()

    async def wait() -> str:
        """Wait."""
        await may_end.wait()
        return "waited"

    client = scripted([called(("look", {"place": "lake"}), ("wait", {}), ("walk", {"hours": 12}))])
    agent = make_agent(client, tools=[look, walk, wait], max_tool_iterations=2)
    turn = asyncio.create_task(take_turn(agent))
    while (1, 0) not in client.learned:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    may_end.set()
    await turn
    await client.finished()
    assert client.learned == {(1, 0): "lake", (1, 1): "waited", (1, 2): "12 hours are too many"}


async def test_all_tasks_are_looked_at_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    all_tasks = asyncio.all_tasks

    def look_at_all() -> set[asyncio.Task[Any]]:
        looks.append(len(all_tasks()))
        return all_tasks()

    monkeypatch.setattr(asyncio, "all_tasks", look_at_all)
    assert await find_tool_tasks(called(("fly", {}), ("walk", {}))) == [None, None]
    assert len(looks) <= 10


@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 20, 60])
async def test_tools_that_are_not_started_at_once_are_found(rounds: int) -> None:
    calls = called(("walk", {"hours": 1}), ("walk", {"hours": 2}))
    may_end = asyncio.Event()

    class Bench(StaticWorkbench):
        async def list_tools(self) -> list[ToolSchema]:
            await may_end.wait()
            return []

    async def start() -> list[Any]:
        for _ in range(rounds):
            await asyncio.sleep(0)
        run: Any = AssistantAgent._execute_tool_call
        options = {"workbench": [Bench([])], "handoff_tools": [], "agent_name": "one"}
        return await asyncio.gather(
            *(run(call, cancellation_token=None, stream=None, **options) for call in calls)
        )

    started = asyncio.create_task(start())
    found = await find_tool_tasks(calls)
    may_end.set()
    results = [result.content for _, result in await started]
    assert [await result_of(task) for task in found if task is not None] == results
    assert len(results) == 2


@pytest.mark.parametrize(
    "failure", [RuntimeError("The bench is broken."), asyncio.CancelledError()]
)
def test_a_tool_that_is_cancelled_or_raises_has_no_result(failure: BaseException) -> None:
    class Bench(StaticWorkbench):
        async def call_tool(self, *_: Any, **__: Any) -> ToolResult:
            await asyncio.sleep(0.01)
            raise failure

    async def run() -> None:
        client = scripted([called(("look", {}))])
        bench = Bench([FunctionTool(look, description="Looks.", name="look")])
        agent = make_agent(client, tools=None, workbench=bench, max_tool_iterations=2)
        # AutoGen waits for such a tool for ever.
        turn = asyncio.create_task(take_turn(agent))
        while not client._learning:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await client.finished()
        turn.cancel()
        assert client.learned == {(1, 0): None}

    asyncio.run(run())
