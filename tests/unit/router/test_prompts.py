"""Test which blocks a router derives from requests' prompts."""

from __future__ import annotations

import httpx
import pytest

from flashmoa.router.blocks import Blocks, text_blocks, token_blocks
from flashmoa.router.prompts import PromptHasher

pytestmark = pytest.mark.anyio
PROMPT = token_blocks([1] * 32)


async def test_engine_tokenises_each_prompt_once() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "plain":
            return httpx.Response(404)
        return httpx.Response(200, json={"tokens": [1] * 32})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        prompts = PromptHasher(http, lambda: True, max_remembered=3)
        for _ in range(2):
            assert await prompts.blocks({"text": "a b"}, "http://ours", {}) == PROMPT
        assert await prompts.blocks({"input_ids": [1] * 32}, "http://ours", {}) == PROMPT
        salted = await prompts.blocks({"prompt": "a b", "cache_salt": "x"}, "http://ours", {})
        assert salted == token_blocks([1] * 32, salt="x")
        for text in ("c", "d"):
            plain = await prompts.blocks({"text": text * 80}, "http://plain", {})
            assert plain == text_blocks(text * 80)
    assert asked == ["ours", "ours", "plain"]


async def test_blocks_of_a_known_prompt_need_no_engine() -> None:
    async with httpx.AsyncClient() as http:
        text = {"text": "a" * 200}
        assert PromptHasher(http, lambda: False).known_blocks(text) == text_blocks("a" * 200)
        asking = PromptHasher(http, lambda: True)
        assert asking.known_blocks(text) == Blocks((), 50)
        assert asking.known_blocks({"input_ids": [1] * 32}) == PROMPT


async def test_input_of_embeddings_is_a_prompt() -> None:
    async with httpx.AsyncClient() as http:
        prompts = PromptHasher(http, lambda: False)
        assert await prompts.blocks({"input": "a" * 200}, "", {}) == text_blocks("a" * 200)
        assert await prompts.blocks({"input": [1] * 32}, "", {}) == PROMPT
        many = await prompts.blocks({"input": ["a" * 100, "b" * 100]}, "", {})
        assert many.length == 50


async def test_prompt_of_scores_begins_with_the_query() -> None:
    query, documents = "a" * 200, ["b" * 100, "c" * 100]
    async with httpx.AsyncClient() as http:
        prompts = PromptHasher(http, lambda: False)
        for name in ("items", "documents"):
            scored = await prompts.blocks({"query": query, name: documents}, "", {})
            assert scored == text_blocks(query + "".join(documents))
        objects = {"query": query, "documents": [{"text": text} for text in documents]}
        scored = await prompts.blocks(objects, "", {})
        assert scored == text_blocks(query + "".join(documents))
        for inputs in (documents, objects["documents"]):
            classified = await prompts.blocks({"labels": [query], "input": inputs}, "", {})
            assert classified == text_blocks(query + "".join(documents))
        one = await prompts.blocks({"query": query, "items": "b"}, "", {})
        assert one == text_blocks(query + "b")
        tokens = {"query": [1] * 16, "items": [[1] * 8, [1] * 8]}
        assert await prompts.blocks(tokens, "", {}) == PROMPT
        assert await prompts.blocks({"query": query}, "", {}) == text_blocks(query)
        assert await prompts.blocks({"query": [1] * 32}, "", {}) == PROMPT
        for odd in ({"items": ["b"]}, {"query": [[1]], "items": [["b"]]}):
            assert await prompts.blocks(odd, "", {}) == Blocks((), 0)
