"""A mixture as a model of the OpenAI API: its configuration, its answers and its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.moa.config import ConfigError, MixtureConfig
from flashmoa.moa.server import application
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio

CONFIG = """
name = "three"
layout = "question-first"
instruction = "Weigh these:"

[[layers]]
models = [{{engine = "{url}", repeat = 2, temperature = 0, max_tokens = {tokens}}}]

[[layers]]
models = [{{engine = "{url}", temperature = 0, max_tokens = {tokens}, ignore_eos = true}}]
"""
QUESTION = [{"role": "user", "content": "What is there to see in Patan?"}]


def config(tmp_path: Path, url: str, tokens: int = 8) -> MixtureConfig:
    path = tmp_path / "moa.toml"
    path.write_text(CONFIG.format(url=url, tokens=tokens))
    return MixtureConfig.read(path)


@pytest.fixture
async def client(engine: LocalEngine, tmp_path: Path) -> AsyncGenerator[AsyncOpenAI]:
    app = application(config(tmp_path, engine.url))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http,
        AsyncOpenAI(
            base_url="http://moa/v1", api_key="-", http_client=http, max_retries=0
        ) as connected,
    ):
        yield connected


async def test_streamed_answer_equals_the_unstreamed_one(client: AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["three"]
    whole = await client.chat.completions.create(model="three", messages=QUESTION)  # type: ignore[arg-type]
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"
    extra = (whole.usage.model_extra or {})["flashmoa"]
    assert [agent["status"] for agent in extra["agents"]] == ["used"] * 3
    stream = await client.chat.completions.create(model="three", messages=QUESTION, stream=True)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and len(chunks) > 3
    assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize(("name", "status"), [("other", 404), ("three", 400)])
async def test_wrong_model_or_messages_are_refused(
    client: AsyncOpenAI, name: str, status: int
) -> None:
    messages = QUESTION if status == 404 else [{"role": "assistant", "content": "?"}]
    with pytest.raises(APIStatusError) as refused:
        await client.chat.completions.create(model=name, messages=messages)  # type: ignore[arg-type]
    assert refused.value.status_code == status


async def test_unreachable_engine_is_reported(tmp_path: Path) -> None:
    app = application(config(tmp_path, "http://127.0.0.1:9"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://moa") as http,
    ):
        answer = await http.post("/v1/chat/completions", json={"messages": QUESTION})
        assert answer.status_code == 502 and "cannot be reached" in answer.text
        body = {"messages": QUESTION, "stream": True}
        answer = await http.post("/v1/chat/completions", json=body)
        assert "cannot be reached" in answer.text and answer.text.endswith("[DONE]\n\n")


async def test_a_stream_that_is_left_ends_its_agents(engine: LocalEngine, tmp_path: Path) -> None:
    async with EngineClient(engine.url) as direct:
        async with AsyncExitStack() as stack:
            mixture = await config(tmp_path, engine.url, tokens=500).build(stack)
            async with mixture.answering(QUESTION) as run:
                async for _ in run:
                    break
            with pytest.raises(UpstreamCancelled):
                await run.result()
        await wait_until_idle(direct)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("layers = 3", "layers: Input should be a valid list"),
        ("[[layers]", "is not valid TOML"),
        ("nmae = 'x'", "nmae: Extra inputs"),
    ],
)
def test_error_of_a_wrong_file_names_the_place(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "moa.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        MixtureConfig.read(path)
