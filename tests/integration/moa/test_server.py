"""Mixtures, staircases and debates as models of the OpenAI API: answers, errors and limits."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, AuthenticationError, RateLimitError

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.moa.serve.application import ServeOptions, application
from flashmoa.moa.serve.config_file import read_file
from tests.integration.router.serving import serve
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio

FILE = """
[models.agent]
engine = "{url}"
temperature = 0
max_tokens = {tokens}

[models.long]                         # It never ends its answer itself.
engine = "{url}"
temperature = 0
max_tokens = {tokens}
ignore_eos = true

[systems.three]
layout = "question-first"
instruction = "Weigh these:"
layers = [{{models = [{{use = "agent", repeat = 2}}]}}, {{models = ["long"]}}]

[systems.stairs]
kind = "staircase"
layers = [{{models = ["agent", "long"]}}, {{models = ["long"]}}]

[systems.votes]
kind = "debate"
layers = [{{models = ["agent", "long"]}}]
debate = {{rounds = 2, ballot = "[a-z]"}}

[systems.judged]
kind = "debate"
layers = [{{models = ["agent", "long"]}}, {{models = ["long"]}}]
debate = {{rounds = 1}}

[systems.failing]                     # Its last aggregator cannot answer.
layers = [
    {{models = ["agent", "long"]}},
    {{models = [{{engine = "http://127.0.0.1:9", model = "gone"}}]}},
]

[systems.gone]
layers = [
    {{models = [{{engine = "http://127.0.0.1:9"}}]}},
    {{models = [{{engine = "http://127.0.0.1:9"}}]}},
]
"""
QUESTION: list[Any] = [{"role": "user", "content": "What is there to see in Patan?"}]


@asynccontextmanager
async def served(
    engine: LocalEngine, folder: Path, options: ServeOptions | None = None, tokens: int = 8
) -> AsyncGenerator[str]:
    """Serve the models of the file; yield the URL."""
    path = folder / "moa.toml"
    path.write_text(FILE.format(url=engine.url, tokens=tokens))
    async with serve(application(read_file(path), options)) as url:
        yield url


@asynccontextmanager
async def connected(url: str, key: str = "-") -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
async def url(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[str]:
    async with served(engine, tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
async def client(url: str) -> AsyncGenerator[AsyncOpenAI]:
    async with connected(url) as openai:
        yield openai


def extra(answer: Any) -> dict[str, Any]:
    """Return the field of a body in which the agents stand."""
    fields: dict[str, Any] = answer.model_extra
    return fields["flashmoa"]


async def test_every_model_of_the_file_is_listed(client: AsyncOpenAI) -> None:
    names = [model.id for model in (await client.models.list()).data]
    assert names == ["three", "stairs", "votes", "judged", "failing", "gone"]
    assert (await client.models.retrieve("stairs")).id == "stairs"
    with pytest.raises(APIStatusError) as refused:
        await client.models.retrieve("four")
    assert refused.value.status_code == 404 and refused.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["three", "stairs", "votes", "judged"])
async def test_streamed_answer_equals_the_unstreamed_one(client: AsyncOpenAI, name: str) -> None:
    whole = await client.chat.completions.create(model=name, messages=QUESTION)
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
        async for chunk in await client.chat.completions.create(
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


async def test_usage_is_that_of_the_agent_that_wrote_the_answer(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="three", messages=QUESTION)
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"
    assert [agent["status"] for agent in extra(whole)["agents"]] == ["used"] * 3


async def test_parameters_reach_the_agent_that_answers_and_no_other(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model="three", messages=QUESTION, max_completion_tokens=3, seed=1, user="ada"
    )
    *proposers, last = extra(whole)["agents"]
    assert last["usage"]["completion_tokens"] == 3
    assert all(agent["usage"]["completion_tokens"] > 3 for agent in proposers)


async def test_an_answer_has_the_asked_form(client: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
    }
    whole = await client.chat.completions.create(
        model="three", messages=QUESTION, response_format=form, max_tokens=40,
        extra_body={"ignore_eos": False},
    )  # fmt: skip
    assert json.loads(whole.choices[0].message.content or "") == {"a": "b"}


async def test_an_answer_ends_before_the_stop_text(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="three", messages=QUESTION)
    text = whole.choices[0].message.content or ""
    stopped = await client.chat.completions.create(model="three", messages=QUESTION, stop=text[3])
    assert stopped.choices[0].message.content == text[: text.index(text[3])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["stop", "response_format"])
async def test_a_staircase_refuses_what_concerns_the_whole_answer(
    client: AsyncOpenAI, name: str
) -> None:
    values: dict[str, Any] = {"stop": "x", "response_format": {"type": "json_object"}}
    with pytest.raises(APIStatusError, match=f"{name} is not possible here") as refused:
        await client.chat.completions.create(
            model="stairs", messages=QUESTION, **{name: values[name]}
        )
    assert (refused.value.status_code, refused.value.param) == (400, name)


async def test_content_parts_and_results_of_tools_are_read(client: AsyncOpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is there to see?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "A golden gate."},
    ]
    for model in ("three", "stairs", "votes", "judged"):
        whole = await client.chat.completions.create(model=model, messages=messages)
        assert whole.choices[0].message.content
        assert {agent["status"] for agent in extra(whole)["agents"]} == {"used"}


@pytest.mark.parametrize(("name", "status"), [("other", 404), ("three", 400)])
async def test_wrong_model_or_messages_are_refused(
    client: AsyncOpenAI, name: str, status: int
) -> None:
    messages: Any = QUESTION if status == 404 else [{"role": "assistant", "content": "?"}]
    with pytest.raises(APIStatusError) as refused:
        await client.chat.completions.create(model=name, messages=messages)
    assert refused.value.status_code == status


async def test_unreachable_engines_are_reported(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"model": "gone", "messages": QUESTION}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 502 and "cannot be reached" in answer.text
        assert answer.json()["error"]["type"] == "server_error"
        answer = await http.post("/v1/chat/completions", json={**body, "stream": True})
        assert "cannot be reached" in answer.text and answer.text.endswith("[DONE]\n\n")


async def test_a_client_of_openai_raises_the_error_of_a_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="gone", messages=QUESTION, stream=True)
    with pytest.raises(APIError, match="cannot be reached"):
        async for _ in stream:
            pass


async def test_a_failed_aggregator_is_replaced_and_named(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="failing", messages=QUESTION)
    *proposers, last = extra(whole)["agents"]
    assert whole.choices[0].message.content and whole.usage is not None
    assert last["status"] == "failed" and "cannot be reached" in last["problem"]
    substitution = extra(whole)["substitution"]
    assert substitution["kind"] == "answer" and "cannot be reached" in substitution["problem"]
    [author] = [agent for agent in proposers if agent["name"] == substitution["agent"]]
    assert whole.usage.completion_tokens == author["usage"]["completion_tokens"]


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


async def test_a_silent_stream_has_comments_which_clients_skip(
    engine: LocalEngine, tmp_path: Path
) -> None:
    options = ServeOptions(heartbeat_seconds=0.001)
    async with served(engine, tmp_path, options) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            body = {"model": "three", "messages": QUESTION, "stream": True}
            answer = await http.post("/v1/chat/completions", json=body)
            assert "\n\n: agents are working\n\n" in answer.text
        async with connected(url) as client:
            stream = await client.chat.completions.create(
                model="three", messages=QUESTION, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"


async def test_metrics_count_questions_agents_and_tokens(
    engine: LocalEngine, tmp_path: Path
) -> None:
    async with served(engine, tmp_path) as url, connected(url) as client:
        for model in ("three", "failing"):
            await client.chat.completions.create(model=model, messages=QUESTION)
        with pytest.raises(APIStatusError):
            await client.chat.completions.create(model="three", messages=QUESTION, n=2)
        async with httpx.AsyncClient(base_url=url) as http:
            page = (await http.get("/metrics")).text
    for line in (
        'questions_total{ending="answered",model="three"} 1.0',
        'questions_total{ending="refused",model=""} 1.0',
        'agents_total{agent_model="default",model="three",status="used"} 3.0',
        'agents_total{agent_model="gone",model="failing",status="failed"} 1.0',
        'substitutions_total{kind="answer",model="failing"} 1.0',
        'running{model="three"} 0.0',
        'seconds_count{model="three"} 1.0',
    ):
        assert f"flashmoa_moa_{line}" in page, page
    assert 'kind="completion",model="three"}' in page


async def test_bodies_as_chat_programs_send_them_are_answered(url: str) -> None:
    """LiteLLM and Open WebUI; the latter also asks for titles of chats."""
    open_webui = {
        "model": "three",
        "messages": [{"role": "system", "content": "Be kind."}, *QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["<|end|>"],
        "logit_bias": {"5": -100},
        "seed": 0,
    }
    litellm = {
        "model": "three",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
        "max_completion_tokens": 6,
        "n": 1,
        "user": "team",
        "metadata": {"tags": "a"},
        "response_format": {"type": "text"},
    }
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post(
            "/v1/chat/completions", json=open_webui, headers={"Authorization": "Bearer -"}
        )
        events = [
            json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")
        ]
        assert events[-1]["usage"]["completion_tokens"] <= 6
        title = {"model": "three", "messages": QUESTION, "stream": False, "max_tokens": 5}
        for body in (litellm, title):
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"
