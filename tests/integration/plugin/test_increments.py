"""How the scheduler makes increments: of many streams at once, and of each stream's new tokens."""

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    Words,
    check_final_request,
    generate,
    nightly_except,
    start_special_engine,
    wait_until_idle,
    wait_until_prefilled,
)
from tests.waiting import LAG

STREAMS = 12
WAYS = {
    "overlap schedule": [],
    "no overlap schedule": ["--disable-overlap-schedule"],
    "pages of 16": ["--page-size", "16"],
}


@pytest.fixture(scope="module", params=nightly_except(WAYS, "overlap schedule"))
async def engine(
    request: pytest.FixtureRequest, engines: LocalEngines, model: Path
) -> AsyncGenerator[LocalEngine]:
    async with start_special_engine(engines, model, *WAYS[request.param]) as engine:
        yield engine


def ends(usage: PromptUsage) -> list[float]:
    """Return when a stream's increments ended. Increments of the same forward end together."""
    assert usage.prompt_stream is not None
    return [span.end for span in usage.prompt_stream.prefills]


async def test_one_forward_computes_increments_of_many_streams(
    client: EngineClient, words: Words
) -> None:
    """Their tokens come while the engine is busy, so that they wait for the same forward."""
    texts = [words(50, 8000 + number) + words(30, 8100 + number)[3:] for number in range(STREAMS)]
    streams = [await client.open_stream(text=words(50, 8000 + n)) for n in range(STREAMS)]
    (busy,) = await client.tokenize([words(5000, 8200)])
    async with anyio.create_task_group() as group:
        group.start_soon(partial(client.prefill_only, input_ids=busy))
        for number, stream in enumerate(streams):
            piece = words(30, 8100 + number)[3:]
            await client.append(stream.id, 0, text=piece, end=True)
    linked: list[str] = []
    increments: list[float] = []
    for text, stream in zip(texts, streams, strict=True):
        await wait_until_prefilled(client, stream.id, 64)
        answer, usage = await generate(client, text, 8, stream.id)
        linked.append(answer)
        increments += ends(usage)
    assert len(increments) >= STREAMS
    assert len(set(increments)) < len(increments)
    await client.flush_cache()
    assert linked == [(await generate(client, text, 8))[0] for text in texts]


@pytest.mark.parametrize("length", [100, 4000])
async def test_increments_compute_only_tokens_that_are_new(
    client: EngineClient, words: Words, length: int
) -> None:
    """Each token is computed once, however long its stream is."""
    await client.flush_cache()
    text = words(length, 8300)
    stream = await client.open_stream(text=text, ttl_seconds=300)
    for seq in range(5):
        text += (piece := words(141, 8310 + seq)[3:])
        await client.append(stream.id, seq, text=piece, end=seq == 4)
        await wait_until_prefilled(client, stream.id, length + 140 * (seq + 1) - LAG)
    state = await wait_until_prefilled(client, stream.id, (length + 700) // 16 * 16)
    assert state.computed_tokens == state.prefilled_tokens
    assert state.increments >= 3
    usage = await check_final_request(client, stream.id, text + " of")
    assert usage.late_tokens is not None and usage.late_tokens <= 17


async def test_a_stream_goes_on_after_the_cache_was_flushed(
    client: EngineClient, words: Words
) -> None:
    """The whole stream is computed again, because its KV is gone."""
    text = words(400, 8400)
    stream = await client.open_stream(text=text, ttl_seconds=300)
    await wait_until_prefilled(client, stream.id, 400 - LAG)
    await client.flush_cache()
    text += (piece := words(60, 8401)[3:])
    await client.append(stream.id, 0, text=piece, end=True)
    state = await wait_until_prefilled(client, stream.id, 448)
    assert state.computed_tokens == state.prefilled_tokens and state.increments > 1
    usage = await check_final_request(client, stream.id, text + " of")
    assert usage.late_tokens is not None and usage.late_tokens <= 17


async def test_a_final_request_comes_while_its_stream_is_being_opened(
    client: EngineClient, words: Words
) -> None:
    """The stream, its tokens, its end and its request reach the scheduler in any order."""
    texts = [words(120, 8500 + number) for number in range(STREAMS)]
    answers: dict[str, str] = {}

    async def ask(http: httpx.AsyncClient, number: int, text: str) -> None:
        body = {"text": text[: 200 + 10 * number]}
        stream_id = (await http.post("/prompt_streams", json=body)).json()["id"]
        if number % 3 == 1:
            await http.delete(f"/prompt_streams/{stream_id}")
        answers[text], _ = await generate(client, text, 8, stream_id)

    async with (
        httpx.AsyncClient(base_url=client.url, timeout=60) as http,
        anyio.create_task_group() as group,
    ):
        for number, text in enumerate(texts):
            group.start_soon(ask, http, number, text)
    await wait_until_idle(client)
    await client.flush_cache()
    assert answers == {text: (await generate(client, text, 8))[0] for text in texts}
