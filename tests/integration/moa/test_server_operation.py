"""A server of mixtures: clients that leave, limits, keys, heartbeats and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anyio
import httpx
import pytest
from openai import APIStatusError, AuthenticationError, RateLimitError

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.moa.serve.application import ServeOptions
from tests.integration.moa.serving import QUESTION, connected, served
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio


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
        # One for n, and one for max_tokens, for which the proposers had been asked.
        'questions_total{ending="refused",model="three"} 2.0',
        'seconds_count{model="three"} 1.0',
    ):
        assert f"flashmoa_moa_{line}" in page, page
    [tokens] = re.findall(r'tokens_total{.*kind="completion",model="three"} ([0-9.]+)', page)
    # Three agents of the first question, and at least one of the one that was refused.
    assert float(tokens) > 3 * 8


async def test_open_webui_finds_the_models_and_gets_answers_and_titles(moa_url: str) -> None:
    """The requests are those of its source, with every parameter that it sends to such servers."""
    chat = {
        "messages": [{"role": "system", "content": "Be kind."}, *QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 6,
        # Sampling, the tiny model now and then writes nothing but white space, which no answer is.
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
        for model in ("three", "stairs", "votes", "judged"):
            assert model in [one["id"] for one in models]
            answer = await http.post("/v1/chat/completions", json={"model": model, **chat})
            assert answer.status_code == 200, answer.text
            lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
            assert 0 < json.loads(lines[-1][6:])["usage"]["completion_tokens"] <= 6
            answer = await http.post("/v1/chat/completions", json={"model": model, **title})
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"
