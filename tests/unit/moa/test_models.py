"""How much room readers' contexts have for answers."""

import pytest

from flashmoa import EngineClient
from flashmoa.moa import Model
from flashmoa.moa.models import room_for_answers

CLIENT = EngineClient("http://127.0.0.1:9")


def set_numbers(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    """Have methods of models return numbers of tokens."""
    for name, number in numbers.items():

        async def tokens(_model: Model, *_: object, number: int = number) -> int:
            return number

        monkeypatch.setattr(Model, name, tokens)


@pytest.mark.parametrize("limits", [(800, 10, None), (10, 800, 10), (None, 10, 10)])
async def test_room_is_what_the_longest_answer_leaves(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int | None, ...]
) -> None:
    """Readers share an engine and a model; an answer without limit has 1,024 tokens."""
    set_numbers(monkeypatch, context_length=2000, _count_tokens=300)
    prompt = [{"role": "user", "content": "Why?"}]
    readers = [Model(CLIENT, sampling={"max_tokens": limit}) for limit in limits]
    room = await room_for_answers(readers, prompt, [None])
    longest = max(limit or 1024 for limit in limits)
    assert room == 2000 - longest - 300


@pytest.mark.parametrize(("name", "expected"), [("a", 100), ("b", 20), ("unlisted", 100)])
async def test_context_is_the_models_and_not_its_engines(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: int
) -> None:
    async def models() -> dict[str, int]:
        return {"a": 100, "b": 20}

    async with EngineClient("http://127.0.0.1:9") as client:
        monkeypatch.setattr(client.plain, "models", models)
        assert await Model(client, name).context_length() == expected


async def test_a_tool_call_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    set_numbers(monkeypatch, context_length=100_000)
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": "stars"}'}}
    prompt = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Many."},
    ]
    assert await Model(CLIENT).fits(prompt, 100_000)
    assert await room_for_answers([Model(CLIENT)], prompt, [10]) is None
    set_numbers(monkeypatch, context_length=100_000, _count_tokens=95_000)
    tool = {"type": "function", "function": {"name": "look", "description": "x" * 99_000}}
    with_tool = Model(CLIENT, sampling={"tools": [tool]})
    assert await room_for_answers([with_tool], prompt, [10]) == 100_000 - 1024 - 95_000


def test_a_limit_of_tokens_replaces_both_of_its_names() -> None:
    model = Model(EngineClient("http://a"), "m", {"max_completion_tokens": 400, "seed": 1})
    assert model.with_sampling({"max_tokens": 10}).sampling == {"seed": 1, "max_tokens": 10}
    assert model.with_sampling({"max_tokens": None}).max_tokens == 400
