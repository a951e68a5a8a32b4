"""Test the AutoGen client on a real engine."""

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import pytest
from autogen_core import CancellationToken
from autogen_core.models import ChatCompletionClient, CreateResult, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from pydantic import BaseModel

from flashmoa import FailurePolicy
from flashmoa.autogen import EngineUsage
from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFailed, Event
from tests.integration.frameworks.autogen.runs import Client, connected, events_of, make
from tests.integration.support import fetch_kv_state, wait_until_idle

HELLO = [SystemMessage(content="Be brief."), UserMessage(content="Hello there", source="user")]


@pytest.fixture
async def chat(engine: LocalEngine) -> AsyncGenerator[Client]:
    async with connected(engine, max_tokens=8) as (client,):
        yield client


async def test_whole_and_streamed_answers_are_the_same_and_have_their_usage(chat: Client) -> None:
    whole = await chat.create(HELLO)
    assert isinstance(whole.content, str) and whole.content
    assert whole.finish_reason == "length"
    items = [item async for item in chat.create_stream(HELLO)]
    again = items[-1]
    assert isinstance(again, CreateResult) and again.content == whole.content
    assert "".join(item for item in items[:-1] if isinstance(item, str)) == whole.content
    assert isinstance(again.usage, EngineUsage)
    assert again.usage.completion_tokens == 8
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert chat.total_usage().completion_tokens == 16
    assert chat.count_tokens(HELLO) == whole.usage.prompt_tokens
    assert chat.remaining_tokens(HELLO) == 32768 - whole.usage.prompt_tokens


async def test_options_of_the_stock_client_reach_the_engine(
    engine: LocalEngine, chat: Client
) -> None:
    result = await chat.create(HELLO, extra_create_args={"logprobs": True, "top_logprobs": 2})
    assert result.logprobs is not None and len(result.logprobs) == 8
    text = str(result.content)
    stopping = make(engine, stop=[text.split()[2]], extra_body={})
    stopped = await stopping.create(HELLO)
    assert stopped.finish_reason == "stop"
    assert isinstance(stopped.content, str) and text.startswith(stopped.content)
    await stopping.close()


async def test_json_and_structured_output_are_valid(engine: LocalEngine) -> None:
    class Plan(BaseModel):
        walking: bool
        town: Literal["Pokhara", "Patan"]

    prompt = [UserMessage(content="A plan", source="user")]
    async with connected(engine, max_tokens=200, extra_body={}) as (client,):
        result = await client.create(prompt, json_output=Plan)
        assert isinstance(result.content, str)
        assert result.finish_reason == "stop"
        assert Plan.model_validate_json(result.content)
        items = [item async for item in client.create_stream(prompt, json_output=Plan)]
        assert isinstance(items[-1], CreateResult)
        assert items[-1].content == result.content
        plain = await client.create(prompt, json_output=True)
        assert isinstance(plain.content, str)
        assert plain.content.lstrip()[:1] in ("{", "[", '"')


async def test_a_required_tool_is_called_and_an_optional_one_need_not_be(
    engine: LocalEngine,
) -> None:
    async def look(place: bool) -> str:
        return str(place)

    tool = FunctionTool(look, name="look", description="looks")
    prompt = [UserMessage(content="Look", source="user")]
    async with connected(engine, max_tokens=400, extra_body={}) as (client,):
        for choice in ("required", tool):
            once = {"parallel_tool_calls": False}
            result = await client.create(
                prompt, tools=[tool], tool_choice=choice, extra_create_args=once
            )
            assert not isinstance(result.content, str)
            assert result.content[0].name == "look"
            assert set(json.loads(result.content[0].arguments)) == {"place"}
            assert result.finish_reason == "function_calls"
        for choice in ("auto", "none"):
            result = await client.create(prompt, tools=[tool], tool_choice=choice)
            assert isinstance(result.content, str)


async def test_cancelling_a_call_or_leaving_its_stream_stops_the_engine(
    engine: LocalEngine, client: EngineClient
) -> None:
    events: list[Event] = []
    async with connected(engine, max_tokens=20000, listener=events.append) as (endless,):
        token = CancellationToken()
        call = asyncio.create_task(endless.create(HELLO, cancellation_token=token))
        while not (await fetch_kv_state(client)).protected:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until_idle(client)

        token = CancellationToken()
        with pytest.raises(asyncio.CancelledError):
            async for item in endless.create_stream(HELLO, cancellation_token=token):
                assert item
                token.cancel()
        await wait_until_idle(client)

        async with aclosing(endless.create_stream(HELLO)) as items:
            await anext(items)
        await wait_until_idle(client)
    # The client's listener hears of calls that no linked team makes.
    failures = [event.error_type for event in events_of(events, CallFailed)]
    assert failures == ["CancelledError", "CancelledError", "GeneratorExit"]


async def test_a_configuration_survives_dump_and_load_and_pickling(engine: LocalEngine) -> None:
    policy = FailurePolicy(stall="finalize", stall_seconds=3.0)
    client = make(
        engine,
        api_key="sesame",
        on_failure=policy,
        max_tokens=8,
        engine_settings=EngineSettings(without_plugin="off"),
    )
    dumped = client.dump_component()
    assert dumped.provider == "flashmoa.autogen.FlashMoAChatCompletionClient"
    assert "sesame" not in dumped.model_dump_json()
    loaded = ChatCompletionClient.load_component(dumped)
    answer = (await client.create(HELLO)).content
    for copied in (loaded, pickle.loads(pickle.dumps(client))):
        assert isinstance(copied, Client)
        assert copied._create_args["extra_body"] == {"ignore_eos": True}
        assert copied.engine.url == client.engine.url
        assert copied.on_failure == policy and copied.engine.settings == client.engine.settings
        assert (await copied.create(HELLO)).content == answer
        await copied.close()
    await client.close()


async def test_model_info_comes_from_the_engine(
    engine: LocalEngine, downstream: LocalEngine
) -> None:
    """The first engine has a parser for tool calls, the second has none."""
    for started, has_parser in ((engine, True), (downstream, False)):
        client = make(started)
        assert client.model_info["function_calling"] is has_parser
        assert client.model_info["vision"] is False
        await client.close()
