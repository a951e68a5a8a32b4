"""What an agent asks when its tools have run is predicted as AutoGen asks it; without engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    ChatCompletionContext,
    HeadAndTailChatCompletionContext,
    TokenLimitedChatCompletionContext,
    UnboundedChatCompletionContext,
)
from autogen_core.tools import FunctionTool, StaticWorkbench, ToolSchema
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoa.link.after_tools import RequestAfterTools
from flashmoa.link.expected import Turn
from tests.unit.frameworks.autogen.scripted_agents import (
    ScriptedClient,
    called,
    look,
    make_agent,
    scripted,
    take_turn,
)

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
def test_every_request_after_tools_is_predicted(
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
        predicted = [each for each in client.predictions if each is not None]
        # An answer to a reflection is predicted like any other, but is not asked for.
        assert len(predicted) >= len(client.prompts) - 1
        for number, (request, prompt) in enumerate(
            zip(predicted, client.prompts[1:], strict=False), start=1
        ):
            await check_request(client, request, number, prompt)

    asyncio.run(check())


async def check_request(
    client: ScriptedClient, held: RequestAfterTools, number: int, prompt: str
) -> None:
    """Check that a prompt was predicted, step by step as the results were learned."""
    certain = (await (await held.expect(Turn(held.agent))).prompt()).stable()
    assert prompt.startswith(certain)
    for place, tool in enumerate(held.tools):
        learned = client.learned[number, place]
        assert learned is not None
        held.results[tool] = learned
        more = (await (await held.expect(Turn(held.agent))).prompt()).stable()
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
    assert [each is not None for each in client.predictions] == predicted
    assert len(client.prompts) == 1 + sum(predicted)


async def test_after_a_handoff_nothing_is_asked() -> None:
    client = scripted([called(("look", {"place": "lake"}), ("transfer_to_two", {}))])
    await take_turn(make_agent(client, handoffs=["two"], max_tool_iterations=3))
    assert client.predictions == [None]


async def test_a_context_that_counts_tokens_is_not_predicted() -> None:
    client = scripted([called(("look", {"place": "lake"}))])
    client.count_tokens = lambda *_, **__: 1  # type: ignore[method-assign]
    context: ChatCompletionContext = TokenLimitedChatCompletionContext(client, token_limit=1000)
    await take_turn(make_agent(client, model_context=context, max_tool_iterations=2))
    assert not client.predictions and "TokenLimited" in client.problems[0]


async def test_a_workbench_is_not_asked_again_for_tools() -> None:
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
    before = asked
    (request, *_) = client.predictions
    assert request is not None
    (after,) = request.requests
    assert await (await after({"look()": "lake"})).render() == client.prompts[1]
    assert asked == before
