"""Test that the router chooses among the data-parallel ranks of a real engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import generation, metric, post_json
from tests.integration.support import TWO_REPLICAS, complete_stream, start_special_engine

pytestmark = [pytest.mark.anyio, pytest.mark.nightly]
Words = Callable[[int, int], str]


@pytest.fixture(scope="module")
async def parallel(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    async with start_special_engine(
        engines, model, "--dp-size", "2", pool=6000, environment=TWO_REPLICAS
    ) as engine:
        yield engine


async def cached_tokens(client: httpx.AsyncClient, text: str, **headers: str) -> int:
    """Ask for one token. Return how many of the prompt's tokens were cached."""
    answer = await client.post("/generate", json=generation(text, 1), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]["cached_tokens"]


async def test_siblings_share_a_rank_and_prefixes_are_spread(
    parallel: LocalEngine, words: Words
) -> None:
    documents = [words(320, 1100 + number) for number in range(4)]
    async with (
        serve_router(make_options(parallel)) as router,
        httpx.AsyncClient(base_url=parallel.url, timeout=60) as direct,
    ):
        for number in range(3):
            for document in documents:
                cached = await cached_tokens(router, f"{document} {words(8, 1110 + number)}")
                # The ranks share no KV, and the engine itself takes them in turn.
                assert cached >= 300 if number else cached < 100
        for rank in range(2):
            place = f'{{engine="{parallel.url}#{rank}"}}'
            assert await metric(router, f"flashmoa_router_prompt_tokens_total{place}") > 6 * 320
            named = {"X-Data-Parallel-Rank": str(rank)}
            cached = [await cached_tokens(direct, text, **named) for text in documents]
            assert sorted(tokens >= 300 for tokens in cached) == [False, False, True, True]
        info = (await router.get("/flashmoa/info")).json()
        assert info["data_parallel_ranks"] == 1


async def test_stream_and_its_request_are_on_one_rank(parallel: LocalEngine, words: Words) -> None:
    async with (
        serve_router(make_options(parallel)) as router,
        EngineClient(str(router.base_url), timeout=60) as client,
        EngineClient(parallel.url, timeout=60) as direct,
    ):
        texts = [words(200, 1140 + number) for number in range(4)]
        streams = [await client.open_stream(text=text) for text in texts]
        for stream in streams:
            await complete_stream(client, stream.id)
        assert [rank.pinned_streams for rank in (await direct.info()).kv] == [2, 2]
        for text, stream in zip(texts, streams, strict=True):
            ask = generation(text + " of", 2, prompt_stream_id=stream.id)
            meta = (await post_json(router, "/generate", ask))["meta_info"]
            assert meta["prompt_stream"]["status"] == "hit" and meta["late_tokens"] < 20
            # A prompt that continues the stream's finds it without the stream.
            assert await cached_tokens(router, text + " the") > 190


async def test_scores_name_a_rank_and_unknown_ranks_are_refused(
    parallel: LocalEngine, words: Words
) -> None:
    document = words(300, 1150)
    body = {"query": document, "items": [" a"], "label_token_ids": [5, 9]}
    async with httpx.AsyncClient(base_url=parallel.url, timeout=60) as direct:
        cached: list[int] = []
        for rank in "00110":
            named = {"X-Data-Parallel-Rank": rank}
            answer = await direct.post("/v1/score", json=body, headers=named)
            assert answer.status_code == 200, answer.text
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert [tokens >= 280 for tokens in cached] == [False, True, False, True, True]
        for rank in ("2", "-1", "one"):
            named = {"X-Data-Parallel-Rank": rank}
            for path, body in (
                ("/generate", generation(document)),
                ("/prompt_streams", {"text": document}),
                ("/prefill_only", {"text": document}),
            ):
                answer = await direct.post(path, json=body, headers=named)
                assert answer.status_code == 400 and "number of data-parallel ranks" in answer.text
