"""Differences between SGLang's releases that the plugin hides from clients."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine

pytestmark = pytest.mark.anyio


async def test_a_refused_request_does_not_count_as_running(
    engine: LocalEngine, client: EngineClient
) -> None:
    """If it did, costs would never be measured, because that waits for other requests."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        before = (await http.get("/flashmoa/info")).json()["in_flight"]["requests"]
        answer = await http.post("/generate", json={"input_ids": [5] * 40_000})
        assert answer.status_code == 400
        after = (await http.get("/flashmoa/info")).json()["in_flight"]["requests"]
    assert after == before


async def test_long_chats_are_rendered(client: EngineClient) -> None:
    content = " ".join(["Nepal"] * 4_000)
    text = await client.render([{"role": "user", "content": content}] * 3)
    turn = f"<|im_start|>user\n{content}<|im_end|>\n"
    assert text == f"{turn * 3}<|im_start|>assistant\n"


async def test_a_salted_stream_serves_salted_chat_only(
    engine: LocalEngine, client: EngineClient, words: Callable[[int, int], str]
) -> None:
    await client.flush_cache()
    messages = [{"role": "user", "content": words(200, 401)}]
    done = await client.prefill_only(messages=messages, cache_salt="one")
    cached: list[int] = []
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        for salt in ("two", "one"):
            body = {"model": "m", "messages": messages, "max_tokens": 1, "cache_salt": salt}
            usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
            cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    assert cached == [0, done.prompt_tokens - 1]
