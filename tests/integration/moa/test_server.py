"""Mixtures, staircases and debates as models of the OpenAI API, and the operation of the server."""

import json
import re
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, AuthenticationError, RateLimitError

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.moa.serve.application import ServeOptions
from tests.integration.framework_scripts import run_frameworks
from tests.integration.moa.serving import QUESTION, connected, extra, served
from tests.integration.support import wait_until_idle


async def test_every_model_of_the_file_is_listed(openai_client: AsyncOpenAI) -> None:
    names = [model.id for model in (await openai_client.models.list()).data]
    assert names == ["three", "stairs", "judged", "council", "failing", "gone"]
    assert (await openai_client.models.retrieve("stairs")).id == "stairs"
    with pytest.raises(APIStatusError) as refused:
        await openai_client.models.retrieve("four")
    assert refused.value.status_code == 404 and refused.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["three", "stairs", "judged", "council"])
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


@pytest.mark.parametrize("name", ["three", "stairs", "council"])
async def test_a_tool_is_called(openai_client: AsyncOpenAI, name: str) -> None:
    """The engine's grammar makes the tiny model call the tool; the next turn has the result."""
    path = {"type": "string", "enum": ["a.py"]}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    function = {"name": "read", "description": "Reads a file.", "parameters": parameters}
    asked: dict[str, Any] = {
        "model": name, "messages": QUESTION, "tools": [{"type": "function", "function": function}],
        "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100,
        "extra_body": {"ignore_eos": False},
    }  # fmt: skip
    whole = (await openai_client.chat.completions.create(**asked)).choices[0].message
    assert whole.tool_calls and whole.tool_calls[0].type == "function"
    called = whole.tool_calls[0].function
    assert called.name == "read" and json.loads(called.arguments) == {"path": "a.py"}
    stream: Any = await openai_client.chat.completions.create(**asked, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    [[call]] = [choice.delta.tool_calls for choice in choices if choice.delta.tool_calls]
    assert (call.index, call.function.arguments) == (0, called.arguments)
    assert choices[-1].finish_reason == "tool_calls"
    turn: dict[str, Any] = whole.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "x = 1"}
    asked |= {"messages": [*QUESTION, turn, result], "tool_choice": "none", "max_tokens": 8}
    answer = await openai_client.chat.completions.create(**{**asked, "extra_body": None})
    assert answer.choices[0].message.content
    assert extra(answer)["agents"][-1]["status"] == "used"


async def test_a_council_tells_who_ranked_what(openai_client: AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(model="council", messages=QUESTION)
    agents = extra(answer)["agents"]
    assert [agent["name"] for agent in agents] == ["1.1", "1.2", "2.1", "2.2", "2.3", "3.1"]
    assert all(agent["text"] for agent in agents)
    assert agents[-1]["text"] == answer.choices[0].message.content
    verdict = extra(answer)["council"]
    assert {one["agent"] for one in verdict["ranking"]} == {"1.1", "1.2"}
    # The grammar begins the reviews, which eight tokens cut off.
    assert all(agent["text"].startswith('{"re') for agent in agents[2:4])
    assert agents[4]["text"].startswith('{"con') and verdict["comparison"] is None
    # The reviewers' prompts are one up to their last question, and the engine computes it once.
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in agents[2:5]]
    assert max(cached) > agents[2]["usage"]["prompt_tokens"] / 2


@pytest.mark.parametrize("name", ["three", "stairs"])
async def test_the_responses_api_answers_alike(openai_client: AsyncOpenAI, name: str) -> None:
    chat = await openai_client.chat.completions.create(model=name, messages=QUESTION)
    asked: dict[str, Any] = {"model": name, "input": QUESTION}
    whole = await openai_client.responses.create(**asked)
    stream: Any = await openai_client.responses.create(**asked, stream=True)
    final = [event async for event in stream][-1].response
    assert whole.output_text == final.output_text == chat.choices[0].message.content
    assert whole.status == final.status == "incomplete"  # The agents' max_tokens cut it.
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.output_tokens == chat.usage.completion_tokens


async def test_a_client_of_openai_raises_the_error_of_a_stream(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(
        model="gone", messages=QUESTION, stream=True
    )
    with pytest.raises(APIError, match="cannot be reached"):
        async for _ in stream:
            pass


async def test_a_client_that_leaves_ends_the_agents(engine: LocalEngine, tmp_path: Path) -> None:
    async with (
        EngineClient(engine.url) as direct,
        served(engine, tmp_path, tokens=5000) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for streams in (True, False):
            body = {"model": "three", "messages": QUESTION, "stream": streams}
            async with anyio.create_task_group() as group:
                group.start_soon(lambda body=body: http.post("/v1/chat/completions", json=body))
                with anyio.fail_after(30):
                    while (await direct.info()).kv[0].protected == 0:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                group.cancel_scope.cancel()
            await wait_until_idle(direct)
        with anyio.fail_after(30):
            left = 'ending="left",model="three"} 2.0'
            while left not in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await anyio.sleep(0.01)


async def test_more_questions_than_allowed_are_refused_for_now(
    engine: LocalEngine, tmp_path: Path
) -> None:
    options = ServeOptions(max_questions=1)
    async with (
        served(engine, tmp_path, options, tokens=5000) as url,
        connected(url) as client,
    ):
        first = await client.chat.completions.create(model="three", messages=QUESTION, stream=True)
        assert (await anext(first)).choices[0].delta.role == "assistant"
        with pytest.raises(RateLimitError) as refused:
            await client.chat.completions.create(model="three", messages=QUESTION)
        assert int(refused.value.response.headers["retry-after"]) > 0
        await first.close()
        with anyio.fail_after(30):
            while True:
                try:
                    again = client.chat.completions.create(
                        model="three", messages=QUESTION, stream=True
                    )
                    await (await again).close()
                    break
                except RateLimitError:
                    await anyio.sleep(0.01)


async def test_clients_need_the_key(engine: LocalEngine, tmp_path: Path) -> None:
    async with served(engine, tmp_path, ServeOptions(api_key="secret")) as url:
        async with connected(url, "guess") as client:
            with pytest.raises(AuthenticationError, match="Incorrect API key provided"):
                await client.chat.completions.create(model="three", messages=QUESTION)
            with pytest.raises(AuthenticationError):
                await client.models.list()
        async with connected(url, "secret") as client:
            assert (await client.models.list()).data
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200


async def test_metrics_count_questions_agents_and_tokens(
    engine: LocalEngine, tmp_path: Path
) -> None:
    async with served(engine, tmp_path) as url, connected(url) as client:
        for model in ("three", "failing"):
            await client.chat.completions.create(model=model, messages=QUESTION)
        with pytest.raises(APIStatusError):
            await client.chat.completions.create(model="three", messages=QUESTION, n=2)
        with pytest.raises(APIStatusError):
            await client.chat.completions.create(model="nobody", messages=QUESTION)
        with pytest.raises(APIStatusError):
            await client.chat.completions.create(model="three", messages=QUESTION, max_tokens=10**9)
        async with httpx.AsyncClient(base_url=url) as http:
            page = (await http.get("/metrics")).text
    for line in (
        'questions_total{ending="answered",model="three"} 1.0',
        'agents_total{agent_model="default",model="three",status="used"} 3.0',
        'agents_total{agent_model="gone",model="failing",status="failed"} 1.0',
        'substitutions_total{kind="answer",model="failing"} 1.0',
        'running{model="three"} 0.0',
        'questions_total{ending="refused",model=""} 1.0',
        # One for n, and one for max_tokens, after the proposers had been asked.
        'questions_total{ending="refused",model="three"} 2.0',
        'seconds_count{model="three"} 1.0',
    ):
        assert f"flashmoa_moa_{line}" in page, page
    [tokens] = re.findall(r'tokens_total{.*kind="completion",model="three"} ([0-9.]+)', page)
    # Three agents of the first question, and at least one agent of the refused question.
    assert float(tokens) > 3 * 8


async def test_open_webui_finds_the_models_and_gets_answers_and_titles(moa_url: str) -> None:
    """The requests are as in Open WebUI's source, with every parameter for such servers."""
    chat = {
        "messages": [{"role": "system", "content": "Be kind."}, *QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 6,
        # With sampling, the tiny model sometimes writes only white space, which is no answer.
        "temperature": 0,
        "top_p": 0.9,
        "min_p": 0.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "reasoning_effort": "low",
        "stop": ["<|end|>"],
        "logit_bias": {"5": -100},
        "seed": 0,
        "response_format": {"type": "text"},
    }
    title = {"messages": QUESTION, "stream": False, "max_completion_tokens": 5}
    headers = {"Authorization": "Bearer -"}
    async with httpx.AsyncClient(base_url=moa_url, timeout=60, headers=headers) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert {"id", "object", "owned_by"} <= models[0].keys()
        for model in ("three", "stairs", "judged"):
            assert model in [one["id"] for one in models]
            answer = await http.post("/v1/chat/completions", json={"model": model, **chat})
            assert answer.status_code == 200, answer.text
            lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
            assert 0 < json.loads(lines[-1][6:])["usage"]["completion_tokens"] <= 6
            answer = await http.post("/v1/chat/completions", json={"model": model, **title})
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.nightly
async def test_litellm_reads_answers_and_errors(engine: LocalEngine, tmp_path: Path) -> None:
    async with served(engine, tmp_path, ServeOptions(api_key="secret")) as url:
        await run_frameworks(
            "test_litellm.py",
            FLASHMOA_MOA=url,
            # Otherwise it fetches the prices of models from the network.
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
