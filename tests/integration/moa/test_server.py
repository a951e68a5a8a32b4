"""Test a mixture as a model of the OpenAI API: its file, its answers and its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
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
ASK = [{"role": "user", "content": "What is there to see in Patan?"}]


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
        ) as asking,
    ):
        yield asking


async def test_streamed_answer_equals_the_unstreamed_one(client: AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["three"]
    whole = await client.chat.completions.create(model="three", messages=ASK)  # type: ignore[arg-type]
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"
    extra = (whole.usage.model_extra or {})["flashmoa"]
    assert [one["status"] for one in extra["agents"]] == ["used"] * 3
    stream = await client.chat.completions.create(model="three", messages=ASK, stream=True)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and len(chunks) > 3
    assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize(("asked", "status"), [("other", 404), ("three", 400)])
async def test_wrong_model_or_messages_are_refused(
    client: AsyncOpenAI, asked: str, status: int
) -> None:
    messages = ASK if status == 404 else [{"role": "assistant", "content": "?"}]
    with pytest.raises(APIStatusError) as refused:
        await client.chat.completions.create(model=asked, messages=messages)  # type: ignore[arg-type]
    assert refused.value.status_code == status


async def test_unreachable_engine_is_reported(tmp_path: Path) -> None:
    app = application(config(tmp_path, "http://127.0.0.1:9"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://moa") as http,
    ):
        answer = await http.post("/v1/chat/completions", json={"messages": ASK})
        assert answer.status_code == 502 and "cannot be reached" in answer.text
        body = {"messages": ASK, "stream": True}
        streamed = await http.post("/v1/chat/completions", json=body)
        assert "cannot be reached" in streamed.text and streamed.text.endswith("[DONE]\n\n")


async def test_closing_a_stream_ends_its_agents(engine: LocalEngine, tmp_path: Path) -> None:
    mixture = config(tmp_path, engine.url, tokens=2000)
    from contextlib import AsyncExitStack

    async with EngineClient(engine.url) as watching:
        async with AsyncExitStack() as stack:
            built = await mixture.build(stack)
            async with built.answering(ASK) as running:
                async for _ in running:
                    break
            with pytest.raises(UpstreamCancelled):
                await running.result()
        await wait_until_idle(watching)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = 3", "layers: Input should be a valid list"),
        ("[[layers]", "is not valid TOML"),
        ("nmae = 'x'", "nmae: Extra inputs"),
    ],
)
def test_invalid_file_is_refused_with_the_place_of_the_error(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "moa.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        MixtureConfig.read(path)
