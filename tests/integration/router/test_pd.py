"""Test the shell router over a real PD pair and the stock router."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient, PluginMissing
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.router.http_calls import (
    generation,
    post_json,
    request_reading,
    request_with_answer,
)
from tests.integration.router.pairs import Pair, running_pairs
from tests.integration.support import LAG, fetch_kv_state, wait_for_streams, wait_until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
Words = Callable[[int, int], str]


def _missing(transport: str) -> str | None:
    if find_spec(transport) is None:
        return f"{transport} is not installed"
    if transport == "mooncake" and not (find_library("ibverbs") or "LD_LIBRARY_PATH" in os.environ):
        return "Mooncake needs libibverbs (apt install libibverbs1 librdmacm1)"
    return None


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
async def pair(
    request: pytest.FixtureRequest, engines: LocalEngines, model: Path
) -> AsyncGenerator[Pair]:
    if reason := _missing(request.param):
        pytest.skip(reason)
    async with running_pairs(engines, {"pair": model}, model, request.param) as pairs:
        yield pairs["pair"]


@pytest.mark.parametrize(("form", "seed"), [("text", 2100), ("tokens", 2110), ("chat", 2120)])
async def test_pd_pair_answers_like_one_engine_and_transfers_no_increments(
    pair: Pair,
    engine: LocalEngine,
    client: EngineClient,
    words: Words,
    form: str,
    seed: int,
) -> None:
    first, rest = words(200, seed), [words(400, seed + 1), words(20, seed + 2)]
    plan = generation(first, tokens=120)
    answers: dict[str, dict[str, Any]] = {}

    async def ask(name: str, path: str, body: dict[str, Any]) -> None:
        answers[name] = await post_json(pair.shell, path, body | {"workflow": form})

    before = await pair.transferred_bytes()
    async with anyio.create_task_group() as group:
        path, body = await request_reading(client, form, rest, "planner")
        group.start_soon(ask, "reader", path, body)
        async with EngineClient(pair.prefill.url) as prefill:
            await wait_for_streams(prefill)
        group.start_soon(ask, "planner", "/generate", plan | {"agent": "planner"})
    transferred = await pair.transferred_bytes() - before
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as direct:
        alone = await post_json(direct, "/generate", plan)
        assert answers["planner"]["output_ids"] == alone["output_ids"]
        path, body = await request_with_answer(client, form, rest, alone)
        expected = await post_json(direct, path, body)
    own = alone["meta_info"]["prompt_tokens"]
    if form == "chat":
        assert answers["reader"]["choices"] == expected["choices"]
        usage = answers["reader"]["usage"]
        usage |= usage["prompt_tokens_details"]
    else:
        assert answers["reader"]["output_ids"] == expected["output_ids"]
        usage = answers["reader"]["meta_info"]
    length = usage["prompt_tokens"]
    assert usage["cached_tokens"] >= length - LAG
    # The KV of the two requests' prompts was transferred, each once.
    assert transferred == pytest.approx((own + length) * pair.bytes_per_token)


async def test_prompt_stream_reaches_only_the_prefill_engine(pair: Pair, words: Words) -> None:
    before = await pair.transferred_bytes()
    async with EngineClient(pair.prefill.url) as prefill, EngineClient(pair.decode.url) as decode:
        free = (await fetch_kv_state(decode)).free
        stream = await prefill.open_stream(text=words(300, 2150))
        for number in range(10):
            await prefill.append(stream.id, number, text=words(30, 2151 + number))
        done = await prefill.prefill_only(text=words(100, 2170))
        assert done.prefilled_tokens > 90
        again = await prefill.prefill_only(text=words(100, 2170))
        assert again.cached_tokens >= done.prompt_tokens - 1
        assert (await fetch_kv_state(decode)).free == free
        await prefill.delete_stream(stream.id)
        await wait_until_idle(prefill)
        with pytest.raises(PluginMissing, match="decodes"):
            await decode.open_stream(text="hi")
        assert (await decode.info()).capabilities == ["render"]
    assert await pair.transferred_bytes() == before
