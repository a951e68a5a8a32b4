"""What an agent asks when its tools have run is predicted as AutoGen asks it; without engines."""

import asyncio
from typing import Any

import pytest
from autogen_core import model_context
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
    model_context.UnboundedChatCompletionContext,
    lambda: model_context.BufferedChatCompletionContext(2),
    lambda: model_context.HeadAndTailChatCompletionContext(1, 1),
)
LOOK = called(("look", {"place": "lake"}))
one_call = st.one_of(
    st.tuples(st.just("look"), st.fixed_dictionaries({"place": st.text()})),
    st.tuples(st.just("walk"), st.fixed_dictionaries({"hours": st.integers(0, 12)})),
    st.tuples(st.just("walk"), st.just("no object")),
    st.tuples(st.just("fly"), st.just({})),
)


@settings(max_examples=60)
@given(
    script=st.lists(st.lists(one_call, min_size=1, max_size=3), min_size=1, max_size=3),
    options=st.fixed_dictionaries(
        {
            "max_tool_iterations": st.integers(1, 3),
            "reflect_on_tool_use": st.booleans(),
            "model_client_stream": st.booleans(),
        }
    ),
    thought=st.sampled_from([None, "Hm.\n"]),
    context=st.sampled_from(CONTEXTS),
)
def test_every_request_after_tools_is_predicted(
    script: list[list[tuple[str, object]]], options: Any, thought: str | None, context: Any
) -> None:
    async def check() -> None:
        client = scripted([called(*calls) for calls in script], thought)
        try:
            await take_turn(make_agent(client, model_context=context(), **options))
        except RuntimeError as error:
            # A reflection that is answered by further calls.
            assert "no valid text" in str(error)
        predicted = [each for each in client.predictions if each is not None]
        # A request after the answer to a reflection is predicted, too, but never comes.
        assert len(predicted) >= len(client.prompts) - 1
        for number, prompt in enumerate(client.prompts[1:]):
            await check_request(client, predicted[number], number + 1, prompt)

    asyncio.run(check())


async def check_request(
    client: ScriptedClient, held: RequestAfterTools, number: int, prompt: str
) -> None:
    """Check that a prompt was predicted, step by step as the results were learned."""

    async def predict() -> str:
        return (await (await held.expect(Turn(held.agent))).prompt()).stable()

    certain = await predict()
    assert prompt.startswith(certain)
    for place, tool in enumerate(held.tools):
        learned = client.learned[number, place]
        assert learned is not None
        held.results[tool] = learned
        more = await predict()
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
async def test_only_coming_requests_are_predicted(
    options: dict[str, Any], predicted: list[bool]
) -> None:
    client = scripted([LOOK] * len(predicted))
    await take_turn(make_agent(client, **options))
    assert [each is not None for each in client.predictions] == predicted
    assert len(client.prompts) == 1 + sum(predicted)


async def test_after_a_handoff_nothing_is_asked() -> None:
    client = scripted([called(("look", {"place": "lake"}), ("transfer_to_two", {}))])
    await take_turn(make_agent(client, handoffs=["two"], max_tool_iterations=3))
    assert client.predictions == [None]


async def test_a_context_that_counts_is_not_predicted() -> None:
    client = scripted([LOOK])
    client.count_tokens = lambda *_, **__: 1  # type: ignore[method-assign]
    context = model_context.TokenLimitedChatCompletionContext(client, token_limit=1000)
    await take_turn(make_agent(client, model_context=context, max_tool_iterations=2))
    assert not client.predictions and "TokenLimited" in client.problems[0]


async def test_a_workbench_is_not_asked_again_for_tools() -> None:
    asked = 0

    class Bench(StaticWorkbench):
        async def list_tools(self) -> list[ToolSchema]:
            nonlocal asked
            asked += 1
            return await super().list_tools()

    client = scripted([LOOK])
    bench = Bench([FunctionTool(look, description="Looks.", name="look")])
    agent = make_agent(client, tools=None, workbench=bench, max_tool_iterations=2)
    await take_turn(agent)
    before = asked
    (request, *_) = client.predictions
    assert request is not None
    (after,) = request.requests
    assert await (await after({"look()": "lake"})).render() == client.prompts[1]
    assert asked == before
