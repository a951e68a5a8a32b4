"""Prompt streams and scores on an engine with two data-parallel ranks, each with its own KV."""

from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.router.http_calls import generation
from tests.integration.support import (
    TWO_REPLICAS,
    Words,
    complete_stream,
    generate,
    start_special_engine,
)

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
async def parallel(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    arguments = ("--dp-size", "2")
    async with start_special_engine(engines, model, *arguments, environment=TWO_REPLICAS) as engine:
        yield engine


async def test_siblings_share_a_rank_and_other_streams_are_spread(
    parallel: LocalEngine, words: Words
) -> None:
    shared = words(600, 700)
    async with EngineClient(parallel.url, timeout=60) as client:
        texts = [shared + words(50, 710 + number)[3:] for number in range(4)]
        streams = [await client.open_stream(text=text) for text in texts]
        states = [await complete_stream(client, stream.id) for stream in streams]
        computed = sum(state.computed_tokens for state in states)
        assert computed < 600 + 4 * 50 + 4 * 8
        stranger = await client.open_stream(text=words(300, 720))
        await complete_stream(client, stranger.id)
        pins = [rank.pinned_streams for rank in (await client.info()).kv]
        assert sorted(pins) == [1, 4]
        for text, stream in zip(texts, streams, strict=True):
            _, usage = await generate(client, text + " of", 2, stream.id)
            assert usage.late_tokens is not None and usage.late_tokens < 20
        await client.delete_stream(stranger.id)


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
