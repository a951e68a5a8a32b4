"""Test that chunks add up to the whole answer that they are pieces of."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.openai_answers import AnswerReader, UnusableStream

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
TOP = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}


@st.composite
def _calls(draw: st.DrawFn) -> Any:
    functions = st.fixed_dictionaries({"name": st.just("look"), "arguments": TEXTS})
    call = {"id": st.sampled_from(["x", "y"]), "type": st.just("function"), "function": functions}
    return draw(st.lists(st.fixed_dictionaries(call), min_size=1, max_size=3))


# OpenRouter's, whose items keep their places in the whole answer.
DETAILS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("reasoning.text"), "text": TEXTS, "format": st.just("f")}
    ),
    min_size=1,
    max_size=3,
).map(lambda items: [{**item, "index": place} for place, item in enumerate(items)])
MESSAGES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS | st.none()},
    optional={
        "reasoning_content": TEXTS | st.none(),
        "refusal": st.none(),
        "tool_calls": _calls() | st.none(),
        "reasoning_details": DETAILS,
    },
)
CHOICES = st.fixed_dictionaries(
    {
        "message": MESSAGES,
        "logprobs": st.none(),
        "finish_reason": st.sampled_from(["stop", "abort"]),
    },
    optional={"stop_reason": TEXTS | st.integers(), "token_ids": st.lists(st.integers(0, 9))},
)
# Fields of a server's own that may be in each chunk, as Perplexity's are.
REPEATED: dict[str, st.SearchStrategy[Any]] = {
    "citations": st.lists(TEXTS, min_size=1, max_size=2),
    "search_results": st.lists(st.fixed_dictionaries({"text": TEXTS, "index": st.just(0)})),
    "provider": TEXTS,
    "metadata": st.fixed_dictionaries({"text": TEXTS}),
}
ANSWERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, min_size=1, max_size=2)},
    optional={
        "usage": st.fixed_dictionaries({"prompt_tokens": st.integers(0, 9)}),
        "system_fingerprint": TEXTS | st.none(),
        **REPEATED,
    },
)


def _cut(draw: st.DrawFn, value: Any) -> list[Any]:
    """Return the pieces of a text or of a list."""
    places = sorted(draw(st.lists(st.integers(0, len(value)), max_size=4)))
    return [value[a:b] for a, b in zip([0, *places], [*places, len(value)], strict=True)]


def _cut_message(draw: st.DrawFn, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of a message."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for name, value in message.items():
        if name == "role":
            deltas += draw(st.sampled_from([[], [{"role": "assistant"}], [{"role": None}]]))
        elif name == "reasoning_details":
            for item in value:
                deltas += [{name: [{**item, "text": piece}]} for piece in _cut(draw, item["text"])]
        elif name != "tool_calls" or value is None:
            deltas += [{name: piece} for piece in (_cut(draw, value) if value else [value])]
            deltas += draw(st.sampled_from([[], [{name: None}]]))
        else:
            for place, call in enumerate(value):
                first, *rest = _cut(draw, call["function"]["arguments"])
                function = {**call["function"], "arguments": first}
                deltas.append({name: [{**call, "index": place, "function": function}]})
                for piece in rest:
                    more = {"index": place, "id": None, "function": {"arguments": piece}}
                    deltas.append({name: [more]})
    return deltas


@st.composite
def cut_answers(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a whole answer, and chunks that add up to it."""
    whole: dict[str, Any] = {**TOP, **draw(ANSWERS)}
    top: dict[str, Any] = {**TOP, "object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for index, choice in enumerate(whole["choices"]):
        choice["index"] = index
        fields = {name: choice[name] for name in choice if name not in ("message", "token_ids")}
        ids = _cut(draw, choice["token_ids"]) if "token_ids" in choice else []
        pieces: list[dict[str, Any]] = [{"delta": x} for x in _cut_message(draw, choice["message"])]
        pieces += [{"delta": None, "token_ids": some} for some in ids]
        pieces += [{"delta": {}, **fields}, *draw(st.sampled_from([[], [{"finish_reason": ""}]]))]
        chunks += [{**top, "choices": [{"index": index, **piece}]} for piece in pieces]
    repeated = {name: whole[name] for name in whole if name in REPEATED}
    for chunk in draw(st.sampled_from([chunks, chunks[:1], []])):
        chunk |= {**repeated, "usage": {"prompt_tokens": 1}, "obfuscation": draw(TEXTS)}
    rest = {name: whole[name] for name in whole if name not in top and name != "choices"}
    if "usage" not in rest:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
    last: dict[str, Any] = {
        **top,
        "id": draw(st.sampled_from(["", "c1", "c2"])),
        "choices": [],
        **rest,
    }
    return whole, [*chunks, last, {}]


def _reader() -> AnswerReader:
    return AnswerReader(is_stream=True, is_strict=True)


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


@given(cut_answers(), st.none() | st.lists(st.integers(0, 10_000), max_size=9))
def test_chunks_add_up_to_the_whole_answer(
    cut: tuple[dict[str, Any], list[Any]], cuts: list[int] | None
) -> None:
    whole, chunks = cut
    pieces, completion = list(map(_event, chunks)), _reader()
    if cuts is not None:
        sent = b"".join(pieces)
        pieces = [sent[a:b] for a, b in pairwise(sorted([0, *cuts, len(sent)]))]
    text = "".join(map(completion.feed, pieces))
    assert completion.body() == whole
    assert text == (whole["choices"][0]["message"]["content"] or "")


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"content": "whole"}},
        {"delta": "text"},
        {"index": "first", "delta": {}},
        {"delta": {"content": [{"type": "text", "text": "a part"}]}},
        {"delta": {"content": {"text": "a"}}},
        {"delta": {"tool_calls": [{"id": "c"}]}},
        {"delta": {"audio": {"data": "b"}}},
        {"delta": {"format": "g"}},
        # The second piece of a text may equal the first.
        {"delta": {"thinking": "ha"}},
        {"delta": {}, "sources": ["b"]},
    ],
)
def test_chunks_that_do_not_add_up_are_no_answer(choice: dict[str, Any]) -> None:
    completion = _reader()
    delta = {"content": "a", "audio": {"data": "a"}, "format": "f", "thinking": "ha"}
    completion.feed(_event({"choices": [{"index": 0, "delta": delta, "sources": ["a"]}]}))
    with pytest.raises(UnusableStream):
        completion.feed(_event({"choices": [choice]}))


@pytest.mark.parametrize("name", ["citations", "provider", "metadata"])
def test_other_values_of_a_servers_own_field_are_no_answer(name: str) -> None:
    values: dict[str, list[Any]] = {"metadata": [{"a": {"b": 1}}, {"a": {"b": 2}}]}
    first, second = values.get(name, [["a"], ["a", "b"]])
    completion = _reader()
    completion.feed(_event({name: first}))
    completion.feed(_event({name: first}))
    with pytest.raises(UnusableStream, match=r"is .* and then"):
        completion.feed(_event({name: second}))


@pytest.mark.parametrize("choices", [None, [], [{"index": 0, "delta": {"content": "half an"}}]])
def test_an_answer_has_a_choice_with_an_end(choices: Any) -> None:
    completion = _reader()
    completion.feed(_event({**TOP, "choices": choices}))
    with pytest.raises(UnusableStream, match="ended before the answer was complete"):
        completion.body()


def test_what_chunks_have_besides_their_texts_is_merged_however_often_it_repeats() -> None:
    completion = _reader()
    calls = [{"index": 0, "id": "x", "function": {"arguments": "1"}}]
    for name in ("content", "reasoning"):
        for top, fields, more in (
            ({"content": "its own"}, {}, {}),
            ({}, {"token_ids": [1]}, {}),
            ({}, {}, {"tool_calls": calls}),
        ):
            for text in "abcc":
                choice = {"index": 0, "delta": {name: text, **more}, **fields}
                completion.feed(_event({**top, "choices": [choice]}))
    completion.feed(_event({"choices": [{"finish_reason": "stop"}]}))
    body = completion.body()
    (choice,) = body["choices"]
    assert (body["content"], choice["token_ids"]) == ("its own", [1] * 8)
    assert choice["message"]["content"] == choice["message"]["reasoning"] == "abcc" * 3
    assert choice["message"]["tool_calls"] == [{"id": "x", "function": {"arguments": "1" * 8}}]


def test_nothing_is_read_after_an_error() -> None:
    completion = _reader()
    chunk = {"choices": [{"delta": {"content": "a"}}]}
    error = {"error": {"message": "no memory"}}
    assert completion.feed(b"".join(map(_event, [chunk, error, chunk, {"error": "b"}]))) == "a"
    assert completion.is_over and completion.error == error
