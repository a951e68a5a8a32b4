"""How much room readers' contexts have for answers."""

from __future__ import annotations

import pytest

from flashmoa import EngineClient
from flashmoa.moa import Model
from flashmoa.moa.models import room_for_answers

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limits", [(800, 10, None), (10, 800, 10), (None, 10, 10)])
async def test_room_is_what_the_reader_with_the_longest_answer_leaves(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int | None, ...]
) -> None:
    """Readers share an engine and a model; an answer without limit has 1,024 tokens."""

    async def context_length(_model: Model) -> int:
        return 2000

    async def count_tokens(_model: Model, _prompt: object) -> int:
        return 300

    monkeypatch.setattr(Model, "context_length", context_length)
    monkeypatch.setattr(Model, "_count_tokens", count_tokens)
    prompt = [{"role": "user", "content": "Why?"}]
    async with EngineClient("http://127.0.0.1:9") as client:
        readers = [Model(client, sampling={"max_tokens": limit}) for limit in limits]
        room = await room_for_answers(readers, prompt, [None])
    longest = max(limit or 1024 for limit in limits)
    assert room == 2000 - longest - 300


@pytest.mark.parametrize(("name", "expected"), [("a", 100), ("b", 20), ("unlisted", 100)])
async def test_context_is_that_of_the_model_and_not_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: int
) -> None:
    async def models() -> dict[str, int]:
        return {"a": 100, "b": 20}

    async with EngineClient("http://127.0.0.1:9") as client:
        monkeypatch.setattr(client.plain, "models", models)
        assert await Model(client, name).context_length() == expected


async def test_call_of_a_tool_needs_room_though_it_has_no_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def context_length(_model: Model) -> int:
        return 100_000

    monkeypatch.setattr(Model, "context_length", context_length)
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": "stars"}'}}
    prompt = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Many."},
    ]
    async with EngineClient("http://127.0.0.1:9") as client:
        assert await Model(client).fits(prompt, 100_000)
        assert await room_for_answers([Model(client)], prompt, [10]) is None
