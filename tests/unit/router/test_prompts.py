"""Test which blocks a router derives from requests' prompts."""

from __future__ import annotations

import json
from dataclasses import replace

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
            assert scored == replace(text_blocks(query + "".join(documents)), items=2)
        objects = {"query": query, "documents": [{"text": text} for text in documents]}
        scored = await prompts.blocks(objects, "", {})
        assert scored == replace(text_blocks(query + "".join(documents)), items=2)
        for inputs in (documents, objects["documents"]):
            classified = await prompts.blocks({"labels": [query], "input": inputs}, "", {})
            assert classified == replace(text_blocks(query + "".join(documents)), items=2)
        one = await prompts.blocks({"query": query, "items": "b"}, "", {})
        assert one == text_blocks(query + "b")
        tokens = {"query": [1] * 16, "items": [[1] * 16, [1] * 8]}
        assert await prompts.blocks(tokens, "", {}) == replace(PROMPT, length=40, items=2)
        assert await prompts.blocks({"query": query}, "", {}) == text_blocks(query)
        assert await prompts.blocks({"query": [1] * 32}, "", {}) == PROMPT
        for odd in ({"items": ["b"]}, {"query": [[1]], "items": [["b"]]}):
            assert await prompts.blocks(odd, "", {}) == Blocks((), 0)


async def test_objects_with_any_fields_are_documents() -> None:
    documents = [{"title": "a" * 50, "body": "b" * 50}, {"title": "c" * 100}]
    async with httpx.AsyncClient() as http:
        prompts = PromptHasher(http, lambda: False)
        scored = await prompts.blocks({"query": {"text": "q" * 80}, "documents": documents}, "", {})
        text = "q" * 80 + "a" * 50 + "b" * 50 + "c" * 100
        assert scored == replace(text_blocks(text), items=2)


async def test_documents_of_a_chat_are_part_of_its_only_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "documents": ["b" * 80, "c" * 80]}
    async with httpx.AsyncClient() as http:
        assert (await PromptHasher(http, lambda: False).blocks(body, "", {})).items == 1


async def test_field_that_is_null_hides_no_prompt() -> None:
    async with httpx.AsyncClient() as http:
        prompts = PromptHasher(http, lambda: False)
        found = await prompts.blocks({"text": None, "prompt": "a" * 80}, "", {})
        assert found == text_blocks("a" * 80)


async def test_list_of_token_prompts_has_the_blocks_of_the_first_and_the_length_of_all() -> None:
    async with httpx.AsyncClient() as http:
        prompts = PromptHasher(http, lambda: False)
        for name in ("input_ids", "prompt", "input"):
            found = await prompts.blocks({name: [[1] * 32, [1] * 8, [2] * 4]}, "", {})
            assert found == replace(PROMPT, length=44, items=3)


async def test_only_the_beginning_of_a_long_list_is_tokenised_and_all_of_it_is_counted() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        question = json.loads(request.content)
        asked.append(question.get("prompt", question.get("messages")))
        return httpx.Response(200, json={"tokens": [1] * 1000})

    items = ["i" * 1000] * 100
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        prompts = PromptHasher(http, lambda: True)
        for _ in range(2):
            blocks = await prompts.blocks({"query": "q" * 5000, "items": items}, "http://a", {})
            length = 1000 + (100_000 - 4096) // 4
            assert blocks == replace(token_blocks([1] * 1000), length=length, items=100)
        messages = [{"role": "user", "content": "q"}]
        chat = await prompts.blocks({"messages": messages, "items": items}, "http://a", {})
        assert chat.length == 1000 + 25_000
        # The engine's prompts of these are other texts.
        for body in ({"query": "q", "documents": items}, {"labels": ["q"], "input": items}):
            assert (await prompts.blocks(body, "http://a", {})).length == (1 + 100_000 + 3) // 4
    assert asked == ["q" * 5000 + "i" * 4096, messages]
