"""Test the shell router over a real PD pair and the stock router."""

import os
from collections.abc import AsyncGenerator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.errors import PluginMissing
from flashmoa.router.forwarding import CHAT
from tests.integration.ears import listening, text_of
from tests.integration.router.http_calls import PlannerAndReader, chat
from tests.integration.router.pairs import Pair, running_pairs
from tests.integration.support import (
    Words,
    fetch_kv_state,
    post_json,
    wait_for_streams,
    wait_until_idle,
)
from tests.waiting import LAG

pytestmark = pytest.mark.slow


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


async def test_pd_pair_answers_like_one_engine_and_transfers_no_increments(
    pair: Pair, engine: LocalEngine, words: Words
) -> None:
    both, before = PlannerAndReader(words, 2100), await pair.transferred_bytes()
    async with EngineClient(pair.prefill.url) as prefill:
        answers = await both.run(pair.shell, lambda: wait_for_streams(prefill))
    transferred = await pair.transferred_bytes() - before
    usages = await both.compare(answers, engine.url)
    prompts = [usage["prompt_tokens"] for usage in usages]
    assert usages[1]["cached_tokens"] >= prompts[1] - LAG
    # The KV of the two requests' prompts was transferred, each once.
    assert transferred == pytest.approx(sum(prompts) * pair.bytes_per_token)


async def test_calls_are_heard_at_the_decode_engine(pair: Pair, words: Words) -> None:
    capabilities = (await pair.shell.get("/flashmoa/info")).json()["capabilities"]
    assert {"calls", "prompt_streams"} <= {*capabilities}
    async with listening(pair.shell) as ear:
        for number in range(2):
            call = ear.name_call()
            pair.shell.headers["X-Request-Id-FlashMoA"] = call
            answer = await post_json(pair.shell, CHAT, chat(words(20, 2180 + number)))
            heard = await ear.until_end(call)
            assert text_of(heard) == answer["choices"][0]["message"]["content"]
            assert heard[-1]["end"] == "length"
    del pair.shell.headers["X-Request-Id-FlashMoA"]


async def test_a_hint_changes_no_answer(pair: Pair, words: Words) -> None:
    """The prefill engine answers such a request, too, and the pair's router reads the answer."""
    asked = chat(words(20, 2190))
    plain = await post_json(pair.shell, CHAT, asked)
    pair.shell.headers["X-Request-Id-FlashMoA-Tokens"] = "8"
    hinted = await post_json(pair.shell, CHAT, asked)
    del pair.shell.headers["X-Request-Id-FlashMoA-Tokens"]
    assert hinted["choices"] == plain["choices"]


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
        assert (await decode.info()).capabilities == ["render", "calls"]
    assert await pair.transferred_bytes() == before
