"""Test which blocks a router derives from requests' prompts."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoa.router.cache_tables import Blocks, text_blocks, token_blocks
from flashmoa.router.prompts import find_blocks
from tests.unit.router.support import FakeConnections

pytestmark = pytest.mark.anyio
PROMPT = token_blocks([1] * 32)
QUERY, DOCUMENTS = "a" * 200, ["b" * 100, "c" * 100]
ALL = text_blocks(QUERY + "".join(DOCUMENTS))


async def found(body: dict[str, Any], answer: object = None) -> tuple[Blocks, list[Any]]:
    """Return a prompt's blocks if an engine tokenises so, or none is asked, and the questions."""
    connections = FakeConnections(lambda _host, _path: answer)
    engine = None if answer is None else "http://a"
    return await find_blocks(body, connections, engine, {}), connections.asked


async def test_an_engine_tokenises_a_text() -> None:
    answer = {"tokens": [1] * 32}
    assert await found({"text": "a b"}, answer) == (PROMPT, [{"prompt": "a b"}])
    assert await found({"input_ids": [1] * 32}, answer) == (PROMPT, [])
    salted, _ = await found({"prompt": "a b", "cache_salt": "x"}, answer)
    assert salted == token_blocks([1] * 32, salt="x")
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "reasoning_effort": "low", "temperature": 1, "model": "m"}
    asked = {"messages": messages, "reasoning_effort": "low", "model": "m"}
    assert await found(chat, answer) == (PROMPT, [asked])
    for body in ({"query": QUERY, "items": DOCUMENTS}, {"labels": [QUERY], "input": "x"}):
        assert (await found(body, answer))[1] == []


@pytest.mark.parametrize("answer", [(500, {}), {"tokens": ["x"]}, {}, [1]])
async def test_an_untokenised_prompt_has_blocks_of_text(answer: object) -> None:
    assert (await found({"text": QUERY}, answer))[0] == text_blocks(QUERY)


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
        ({"query": [1] * 16, "items": [[1] * 16, [1] * 8]}, token_blocks([1] * 40)),
        ({}, Blocks((), 0)),
        # The texts of embeddings share nothing.
        ({"input": QUERY}, text_blocks(QUERY)),
        ({"input": [1] * 32}, PROMPT),
        ({"input": DOCUMENTS}, text_blocks("".join(DOCUMENTS))),
        # A field that is null hides no prompt.
        ({"text": None, "prompt": QUERY}, text_blocks(QUERY)),
        ({"prompt": [QUERY, QUERY]}, text_blocks(QUERY * 2)),
        *(
            ({name: [[1] * 32, [1] * 8, [2] * 4]}, token_blocks([1] * 40 + [2] * 4))
            for name in ("input_ids", "prompt", "input")
        ),
    ],
)
async def test_prompt_of_each_route(body: dict[str, Any], expected: Blocks) -> None:
    assert (await found(body))[0] == expected
