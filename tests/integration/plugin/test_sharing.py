"""The intra-turn prefix cache: tokens that requests share are computed once."""

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    GREEDY,
    Words,
    fetch_kv_state,
    generate,
    nightly_except,
    start_special_engine,
    wait_until_prefilled,
)

SHARED = 2000
OWN = 40
REQUESTS = 16
# Prompt tokens in a forward, where prompts are cut into chunks.
CHUNK = 512
# The largest allowed ratio of computed prompt tokens to unique ones.
DUPLICATES = 1.01
WAYS = {
    "pages of 1": ["--page-size", "1"],
    "pages of 16, lpm": ["--page-size", "16", "--schedule-policy", "lpm"],
    "dfs-weight": ["--schedule-policy", "dfs-weight"],
    "without the overlap schedule": ["--disable-overlap-schedule"],
    "chunks": ["--chunked-prefill-size", str(CHUNK), "--page-size", "16"],
}


@pytest.fixture(scope="module", params=nightly_except(WAYS, "pages of 1"))
async def engine(
    request: pytest.FixtureRequest, engines: LocalEngines, model: Path
) -> AsyncGenerator[LocalEngine]:
    async with start_special_engine(engines, model, *WAYS[request.param]) as engine:
        yield engine


@pytest.fixture
def texts(words: Words) -> list[str]:
    shared = words(SHARED, 1)
    return [shared + words(OWN + 1, 100 + number)[3:] for number in range(REQUESTS)]


async def answers(client: EngineClient, texts: list[str]) -> tuple[list[str], int]:
    """Ask for all answers at once. Return them, and how many prompt tokens were computed."""
    done: dict[str, str] = {}
    computed = 0

    async def ask(text: str) -> None:
        nonlocal computed
        done[text], usage = await generate(client, text, 4)
        computed += usage.prompt_tokens - usage.cached_tokens

    async with anyio.create_task_group() as group:
        for text in texts:
            group.start_soon(ask, text)
    return [done[text] for text in texts], computed


async def answers_one_by_one(client: EngineClient, texts: list[str]) -> list[str]:
    answers: list[str] = []
    for text in texts:
        await client.flush_cache()
        answer, usage = await generate(client, text, 4)
        assert usage.prompt_tokens == SHARED + OWN
        answers.append(answer)
    return answers


async def test_sixteen_requests_compute_shared_tokens_once(
    client: EngineClient, texts: list[str], words: Words
) -> None:
    expected = await answers_one_by_one(client, texts)
    unique = SHARED + REQUESTS * OWN
    await client.flush_cache()
    spread, computed_spread = await answers(client, texts)
    await client.flush_cache()
    (busy,) = await client.tokenize([words(1500, 2)])
    async with anyio.create_task_group() as group:
        group.start_soon(partial(client.prefill_only, input_ids=busy))
        together, computed_together = await answers(client, texts)
    await client.flush_cache()
    await client.prefill_only(text=words(SHARED, 1)[:3000])
    before = await client.prefill_only(text=words(SHARED, 1)[:3000])
    cached, computed_cached = await answers(client, texts)
    assert spread == together == cached == expected
    assert computed_spread <= DUPLICATES * unique
    assert computed_together <= DUPLICATES * unique
    assert computed_cached <= DUPLICATES * (unique - before.cached_tokens)


async def test_tokens_that_a_batch_shares_are_computed_once_and_counted(
    request: pytest.FixtureRequest,
    client: EngineClient,
    texts: list[str],
    words: Words,
) -> None:
    """The requests arrive while the engine is busy, so that they are all in one batch."""
    await client.flush_cache()
    before = (await fetch_kv_state(client)).duplicates_avoided
    sampling = {**GREEDY, "max_new_tokens": 1}
    # A long text would be tokenised beside the requests, and come after them.
    (busy,) = await client.tokenize([words(6000, 3)])
    async with (
        httpx.AsyncClient(base_url=client.url, timeout=60) as http,
        anyio.create_task_group() as group,
    ):
        group.start_soon(partial(client.prefill_only, input_ids=busy))
        sent = await http.post("/generate", json={"text": texts, "sampling_params": sampling})
    metas = [answer["meta_info"] for answer in sent.raise_for_status().json()]
    computed = sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in metas)
    avoided = (await fetch_kv_state(client)).duplicates_avoided - before
    assert computed <= DUPLICATES * (SHARED + REQUESTS * OWN)
    # If they wait for each other, most shared tokens are cached before they are counted. A request
    # that finds no room in a chunk would wait without the plugin, too.
    in_chunks = request.node.callspec.params["engine"] == "chunks"
    assert avoided >= (CHUNK if in_chunks else 2 * SHARED)


async def test_streams_compute_shared_tokens_once(client: EngineClient, texts: list[str]) -> None:
    await client.flush_cache()
    streams = [await client.open_stream(text=text) for text in texts]
    for stream in streams:
        await client.append(stream.id, 0, end=True)
    computed = 0
    for stream in streams:
        state = await wait_until_prefilled(client, stream.id, SHARED)
        computed += state.computed_tokens
        await client.delete_stream(stream.id)
    assert computed <= DUPLICATES * (SHARED + REQUESTS * OWN)
