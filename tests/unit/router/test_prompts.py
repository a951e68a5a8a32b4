"""Test which blocks a router derives from requests' prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashmoa.router.cache_tables import Blocks, text_blocks, token_blocks
from flashmoa.router.prompts import PromptHasher
from tests.unit.router.support import FakeConnections

pytestmark = pytest.mark.anyio
PROMPT = token_blocks([1] * 32)
TWO = replace(PROMPT, length=40, is_list=True)
QUERY, DOCUMENTS = "a" * 200, ["b" * 100, "c" * 100]
ALL = replace(text_blocks(QUERY + "".join(DOCUMENTS)), is_list=True)


def hasher(answer: object = None, **options: Any) -> PromptHasher:
    """Return what asks engines that answer so, or none if there is no answer."""
    connections = FakeConnections(lambda _host, _path: answer)
    return PromptHasher(connections, lambda: answer is not None, **options)


async def test_engine_tokenises_each_prompt_once() -> None:
    asked: list[str] = []

    def answer(host: str, _path: str) -> object:
        asked.append(host)
        return (404, {}) if host == "plain" else {"tokens": [1] * 32}

    prompts = PromptHasher(FakeConnections(answer), lambda: True, max_remembered=3)
    for _ in range(2):
        assert await prompts.blocks({"text": "a b"}, "http://ours", {}) == PROMPT
    assert await prompts.blocks({"input_ids": [1] * 32}, "http://ours", {}) == PROMPT
    salted = await prompts.blocks({"prompt": "a b", "cache_salt": "x"}, "http://ours", {})
    assert salted == token_blocks([1] * 32, salt="x")
    plain = await prompts.blocks({"text": "c" * 80}, "http://plain", {})
    assert plain == text_blocks("c" * 80)
    assert asked == ["ours", "ours", "plain"]


@pytest.mark.parametrize("answer", [(500, {}), {"tokens": ["x"]}, {}, [1]])
async def test_prompt_that_no_engine_tokenises_has_the_blocks_of_its_text(answer: object) -> None:
    assert await hasher(answer).blocks({"text": QUERY}, "", {}) == text_blocks(QUERY)


async def test_blocks_of_a_known_prompt_need_no_engine() -> None:
    assert hasher().known_blocks({"text": QUERY}) == text_blocks(QUERY)
    asking = hasher({})
    assert asking.known_blocks({"text": QUERY}) == Blocks((), 50)
    assert asking.known_blocks({"input_ids": [1] * 32}) == PROMPT


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Scores and ranks begin with the query, and classes with the labels.
        ({"query": QUERY, "items": DOCUMENTS}, ALL),
        ({"query": QUERY, "documents": DOCUMENTS}, ALL),
        ({"labels": [QUERY], "input": DOCUMENTS}, ALL),
        # Documents may be objects with any fields.
        ({"query": QUERY, "documents": [{"x": 1}]}, text_blocks(QUERY + '{"x": 1}')),
        ({"query": QUERY, "items": "b"}, text_blocks(QUERY + "b")),
        ({"query": QUERY}, text_blocks(QUERY)),
        ({"query": [1] * 32}, PROMPT),
        (
            {"query": [1] * 16, "items": [[1] * 16, [1] * 8]},
            replace(PROMPT, length=40, is_list=True),
        ),
        ({}, Blocks((), 0)),
        # The texts of embeddings share nothing.
        ({"input": QUERY}, text_blocks(QUERY)),
        ({"input": [1] * 32}, PROMPT),
        ({"input": DOCUMENTS}, replace(text_blocks("".join(DOCUMENTS)), is_list=True)),
        # A field that is null hides no prompt.
        ({"text": None, "prompt": QUERY}, text_blocks(QUERY)),
        ({"prompt": [QUERY, QUERY]}, replace(text_blocks(QUERY * 2), is_list=True)),
        *(
            ({name: [[1] * 32, [1] * 8, [2] * 4]}, replace(PROMPT, length=44, is_list=True))
            for name in ("input_ids", "prompt", "input")
        ),
    ],
)
async def test_prompt_of_each_route(body: dict[str, Any], expected: Blocks) -> None:
    assert await hasher().blocks(body, "", {}) == expected


async def test_engines_are_asked_for_the_tokens_of_single_prompts_only() -> None:
    connections = FakeConnections(lambda _host, _path: {"tokens": [1] * 1000})
    prompts, items = PromptHasher(connections, lambda: True), ["i" * 1000] * 100
    for body in ({"query": "q" * 5000, "items": items}, {"labels": ["q" * 5000], "input": items}):
        found = await prompts.blocks(body, "http://a", {})
        # The beginning of a long list suffices to recognise it.
        beginning = text_blocks("q" * 5000 + "i" * 4096)
        assert found == replace(beginning, length=105_000 // 4, is_list=True)
    assert await prompts.blocks({"input": "e" * 9000}, "http://a", {}) == token_blocks([1] * 1000)
    assert [one["prompt"] for one in connections.asked] == ["e" * 9000]
