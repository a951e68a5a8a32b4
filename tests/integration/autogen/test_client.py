"""Test the AutoGen client on a real engine."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import anyio
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken, Image
from autogen_core.models import (
    ChatCompletionClient,
    CreateResult,
    ModelInfo,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from pydantic import BaseModel

from flashmoa import FailurePolicy
from flashmoa.autogen import EngineUsage, FlashMoAChatCompletionClient
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio

HELLO = [SystemMessage(content="Be brief."), UserMessage(content="Hello there", source="user")]


def make(engine: LocalEngine, **kwargs: object) -> FlashMoAChatCompletionClient:
    settings: dict[str, object] = {"temperature": 0, "max_tokens": 8, **kwargs}
    return FlashMoAChatCompletionClient(model="tiny", base_url=engine.url, **settings)


@pytest.fixture
async def chat(engine: LocalEngine) -> AsyncGenerator[FlashMoAChatCompletionClient]:
    made = make(engine)
    yield made
    await made.close()


async def test_an_answer_has_its_usage(chat: FlashMoAChatCompletionClient) -> None:
    result = await chat.create(HELLO)
    assert isinstance(result.content, str) and result.content
    assert result.finish_reason == "length"
    again = await chat.create(HELLO)
    assert again.content == result.content
    assert isinstance(again.usage, EngineUsage)
    assert again.usage.completion_tokens == 8
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert chat.total_usage().completion_tokens == 16


async def test_streaming_gives_the_same_answer_and_usage(
    chat: FlashMoAChatCompletionClient,
) -> None:
    whole = await chat.create(HELLO)
    items = [item async for item in chat.create_stream(HELLO)]
    result = items[-1]
    assert isinstance(result, CreateResult)
    assert "".join(item for item in items[:-1] if isinstance(item, str)) == whole.content
    assert result.content == whole.content
    assert result.usage.prompt_tokens == whole.usage.prompt_tokens
    assert result.usage.completion_tokens == 8


async def test_a_stop_string_ends_the_answer(
    engine: LocalEngine, chat: FlashMoAChatCompletionClient
) -> None:
    text = (await chat.create(HELLO)).content
    assert isinstance(text, str)
    stopping = make(engine, stop=[text.split()[2]])
    result = await stopping.create(HELLO)
    assert result.finish_reason == "stop"
    assert isinstance(result.content, str) and text.startswith(result.content)
    await stopping.close()


async def test_json_and_structured_output_are_valid(engine: LocalEngine) -> None:
    class Plan(BaseModel):
        walking: bool
        town: Literal["Pokhara", "Patan"]

    client = make(engine, max_tokens=200)
    try:
        prompt = [UserMessage(content="A plan", source="user")]
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
    finally:
        await client.close()


async def test_a_required_tool_is_called(engine: LocalEngine) -> None:
    async def look(place: bool) -> str:
        return str(place)

    tool = FunctionTool(look, name="look", description="looks")
    client = make(engine, max_tokens=400)
    try:
        prompt = [UserMessage(content="Look", source="user")]
        for choice in ("required", tool):
            result = await client.create(
                prompt,
                tools=[tool],
                tool_choice=choice,
                extra_create_args={"parallel_tool_calls": False},
            )
            assert not isinstance(result.content, str)
            assert result.content[0].name == "look"
            assert set(json.loads(result.content[0].arguments)) == {"place"}
            assert result.finish_reason == "function_calls"
    finally:
        await client.close()


async def test_optional_tools_need_not_be_called(chat: FlashMoAChatCompletionClient) -> None:
    async def look(place: str) -> str:
        return place

    tool = FunctionTool(look, name="look", description="looks")
    prompt = [UserMessage(content="Look", source="user")]
    for choice in ("auto", "none"):
        result = await chat.create(prompt, tools=[tool], tool_choice=choice)
        assert isinstance(result.content, str)


async def test_logprobs_are_returned_on_request(chat: FlashMoAChatCompletionClient) -> None:
    result = await chat.create(HELLO, extra_create_args={"logprobs": True, "top_logprobs": 2})
    assert result.logprobs is not None
    assert len(result.logprobs) == 8
    assert all(entry.logprob <= 0 for entry in result.logprobs)


async def test_images_are_accepted_if_model_info_has_vision(engine: LocalEngine) -> None:
    pixel = Image.from_base64(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    message = UserMessage(content=["look", pixel], source="user")
    blind = make(engine)
    with pytest.raises(ValueError, match="vision"):
        await blind.create([message])
    await blind.close()
    info: ModelInfo = {**blind.model_info, "vision": True}
    seeing = make(engine, model_info=info)
    params = seeing._process_create_args([message], [], "auto", None, {})
    assert "image_url" in str(params.messages)
    await seeing.close()


async def test_cancelling_stops_the_engine(engine: LocalEngine, client: EngineClient) -> None:
    endless = make(engine, max_tokens=20000, extra_body={"ignore_eos": True})
    prompt = [UserMessage(content="Go on", source="user")]
    token = CancellationToken()
    call = asyncio.create_task(endless.create(prompt, cancellation_token=token))
    await running(client)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await wait_until_idle(client)

    token = CancellationToken()
    with pytest.raises(asyncio.CancelledError):
        async for item in endless.create_stream(prompt, cancellation_token=token):
            assert item
            token.cancel()
    await wait_until_idle(client)
    await endless.close()


async def test_leaving_a_stream_stops_the_engine(engine: LocalEngine, client: EngineClient) -> None:
    endless = make(engine, max_tokens=20000, extra_body={"ignore_eos": True})
    async with aclosing(endless.create_stream(HELLO)) as items:
        async for item in items:
            assert item
            break
    await wait_until_idle(client)
    await endless.close()


async def running(client: EngineClient) -> None:
    with anyio.fail_after(20):
        while (await client.info()).kv[0].protected == 0:  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_configuration_survives_dump_and_load(engine: LocalEngine) -> None:
    policy = FailurePolicy(stall="finalize", stall_seconds=3.0)
    client = make(engine, extra_body={"ignore_eos": True}, api_key="sesame", on_failure=policy)
    dumped = client.dump_component()
    assert dumped.provider == "flashmoa.autogen.FlashMoAChatCompletionClient"
    assert "sesame" not in dumped.model_dump_json()
    loaded = ChatCompletionClient.load_component(dumped)
    assert isinstance(loaded, FlashMoAChatCompletionClient)
    assert loaded._create_args["extra_body"] == {"ignore_eos": True}
    assert loaded.engine.url == client.engine.url
    assert loaded.on_failure == policy
    assert (await loaded.create(HELLO)).content == (await client.create(HELLO)).content
    await loaded.close()
    await client.close()


async def test_an_agent_with_the_client_dumps_and_loads(engine: LocalEngine) -> None:
    client = make(engine)
    agent = AssistantAgent("one", model_client=client)
    loaded = AssistantAgent.load_component(agent.dump_component())
    assert isinstance(loaded._model_client, FlashMoAChatCompletionClient)
    await loaded._model_client.close()
    await client.close()


async def test_a_pickled_client_works(engine: LocalEngine) -> None:
    client = make(engine)
    copied = pickle.loads(pickle.dumps(client))
    assert (await copied.create(HELLO)).content == (await client.create(HELLO)).content
    await copied.close()
    await client.close()


async def test_token_counts_are_the_engines(chat: FlashMoAChatCompletionClient) -> None:
    usage = (await chat.create(HELLO)).usage
    assert chat.count_tokens(HELLO) == usage.prompt_tokens
    assert chat.remaining_tokens(HELLO) == 32768 - usage.prompt_tokens


async def test_the_default_base_url_is_a_local_engine_or_openai_base_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert FlashMoAChatCompletionClient(model="tiny").engine.url == "http://127.0.0.1:30000"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere:1/v1")
    assert FlashMoAChatCompletionClient(model="tiny").engine.url == "http://elsewhere:1"
    assert FlashMoAChatCompletionClient(model="gpt-4o").model_info["vision"]


async def test_model_info_comes_from_the_engine(
    engine: LocalEngine, downstream: LocalEngine
) -> None:
    """The first engine has a parser for tool calls, the second has none."""
    for started, has_parser in ((engine, True), (downstream, False)):
        client = make(started)
        assert client.model_info["function_calling"] is has_parser
        assert client.model_info["vision"] is False
        await client.close()


async def test_invalid_arguments_are_refused(engine: LocalEngine) -> None:
    with pytest.raises(ValueError, match="not an engine's URL"):
        FlashMoAChatCompletionClient(model="tiny", base_url="localhost:30000")
    with pytest.raises(ValueError, match="stall_seconds must be a positive number"):
        make(engine, on_failure=FailurePolicy(stall_seconds=-1))
