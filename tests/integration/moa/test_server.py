"""Mixtures, staircases and debates as models of the OpenAI API: answers and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from tests.integration.moa.serving import QUESTION, extra

pytestmark = pytest.mark.anyio


async def test_every_model_of_the_file_is_listed(openai_client: AsyncOpenAI) -> None:
    names = [model.id for model in (await openai_client.models.list()).data]
    assert names == ["three", "stairs", "votes", "judged", "failing", "gone"]
    assert (await openai_client.models.retrieve("stairs")).id == "stairs"
    with pytest.raises(APIStatusError) as refused:
        await openai_client.models.retrieve("four")
    assert refused.value.status_code == 404 and refused.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["three", "stairs", "votes", "judged"])
async def test_streamed_answer_equals_the_unstreamed_one(
    openai_client: AsyncOpenAI, name: str
) -> None:
    whole = await openai_client.chat.completions.create(model=name, messages=QUESTION)
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    agents = extra(whole)["agents"]
    assert {agent["status"] for agent in agents} == {"used"}
    assert extra(whole)["completion_tokens"] == sum(
        agent["usage"]["completion_tokens"] for agent in agents
    )
    options: Any = {"include_usage": True}
    chunks = [
        chunk
        async for chunk in await openai_client.chat.completions.create(
            model=name, messages=QUESTION, stream=True, stream_options=options
        )
    ]
    *texts, last, usage = chunks
    assert all(chunk.usage is None for chunk in [*texts, last])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in texts)
    assert text == whole.choices[0].message.content and text
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(extra(last)["agents"]) == len(agents)
    assert not usage.choices and usage.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("name", ["three", "stairs"])
async def test_an_answer_has_the_asked_form(openai_client: AsyncOpenAI, name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
    }
    given: Any = {
        "model": name, "messages": QUESTION, "response_format": form, "max_tokens": 40,
        "extra_body": {"ignore_eos": False},
    }  # fmt: skip
    whole = await openai_client.chat.completions.create(**given)
    assert json.loads(whole.choices[0].message.content or "") == {"a": "b"}
    stream: Any = await openai_client.chat.completions.create(**given, stream=True)
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert json.loads("".join(pieces)) == {"a": "b"}
    for body in (whole, chunks[-1]):
        in_one_request_for = extra(body).get("in_one_request_for")
        assert in_one_request_for == (["response_format"] if name == "stairs" else [])


async def test_content_parts_and_results_of_tools_are_read(openai_client: AsyncOpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is there to see?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "A golden gate."},
    ]
    for model in ("three", "stairs", "votes", "judged"):
        whole = await openai_client.chat.completions.create(model=model, messages=messages)
        assert whole.choices[0].message.content
        assert {agent["status"] for agent in extra(whole)["agents"]} == {"used"}


async def test_a_client_of_openai_raises_the_error_of_a_stream(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(
        model="gone", messages=QUESTION, stream=True
    )
    with pytest.raises(APIError, match="cannot be reached"):
        async for _ in stream:
            pass


async def test_a_failed_aggregator_is_replaced_and_named(openai_client: AsyncOpenAI) -> None:
    whole = await openai_client.chat.completions.create(model="failing", messages=QUESTION)
    *proposers, last = extra(whole)["agents"]
    assert whole.choices[0].message.content and whole.usage is not None
    assert last["status"] == "failed" and "cannot be reached" in last["problem"]
    substitution = extra(whole)["substitution"]
    assert substitution["kind"] == "answer" and "cannot be reached" in substitution["problem"]
    [author] = [agent for agent in proposers if agent["name"] == substitution["agent"]]
    assert whole.usage.completion_tokens == author["usage"]["completion_tokens"]
