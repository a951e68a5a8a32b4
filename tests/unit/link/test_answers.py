"""Test that answers are read from the bytes of responses, however these are cut."""

import json
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.link.answers import AnswerReader
from tests.unit.openai.fake_server import lines_of


def chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return lines_of([{"choices": [choice]}])[0]


def document(finish_reason: str, usage: Any = None, **message: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("is_stream", "data", "text", "problem"),
    [
        (True, chunk(content="Hello"), "Hello", "not read to its end"),
        (True, b'data: {"error": {"message": "no memory"}}\n\n', "", "no memory"),
        (False, b"<html>", "", "<html>"),
    ],
)
def test_an_answer_without_an_end_has_a_problem(
    is_stream: bool, data: bytes, text: str, problem: str
) -> None:
    reader = AnswerReader(is_stream=is_stream)
    assert reader.feed(data) == text
    assert reader.result() is None and problem in reader.problem


def test_odd_parts_of_a_chunk_are_no_problem() -> None:
    reader = AnswerReader(is_stream=True)
    problem = reader.problem
    odd = [
        {},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"delta": None}], "usage": None},
        *[{"choices": [{"delta": {"reasoning": {"an": "object"}}}]}] * 3,
    ]
    data = [b"data:\n\n", *lines_of(odd, is_whole=False)]
    text = "".join(map(reader.feed, [chunk(content="Hé"), *data, chunk(content="llo")]))
    assert text == "Héllo" and reader.problem == problem
    reader.feed(b'data: {"choices": [{"finish_reason":\r\ndata: "stop", "delta": null}]}\r\n')
    result = reader.result()
    assert result is not None and result.text == text


def test_a_tool_call_is_not_forwarded() -> None:
    reader = AnswerReader(is_stream=True)
    reader.feed(chunk(content="I look.") + chunk("tool_calls", tool_calls=[{"index": 0}]))
    result = reader.result()
    assert result is not None and not result.is_forwarded


def test_a_whole_answer_is_read_with_its_usage() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    reader = AnswerReader(is_stream=False)
    assert reader.feed(document("length", usage, content="Hello")) == "Hello"
    result = reader.result()
    assert result is not None and result.usage is not None
    assert (result.usage.prompt_tokens, result.finish_reason) == (3, "length")


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_text_of_an_answer_in_parts_is_read(is_stream: bool) -> None:
    parts = [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Hé"}, "llo"]
    reader = AnswerReader(is_stream=is_stream)
    streamed = chunk(content=parts[:2]) + chunk("stop", content=parts[2:])
    text = reader.feed(streamed if is_stream else document("stop", content=parts))
    result = reader.result()
    assert result is not None and result.is_forwarded
    assert text == result.text == "Héllo"


@pytest.mark.parametrize(("is_stream", "has_places"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("text", ["", "I look. "])
def test_an_answer_with_tool_calls_is_a_message(
    is_stream: bool, has_places: bool, text: str
) -> None:
    calls = [
        {"id": f"id {n}", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
        for n in range(2)
    ]
    reader = AnswerReader(is_stream=is_stream)
    if is_stream:
        data = chunk(role="assistant", content=text, reasoning_content="Hm") + chunk(content=None)
        for place, call in enumerate(calls):
            at = {"index": place} if has_places else {}
            first = {**call, **at, "function": {"name": "look", "arguments": '{"a"'}}
            more = {**at, "id": None, "function": {"name": None, "arguments": ": 1}"}}
            data += chunk(tool_calls=[first]) + chunk(tool_calls=[more])
        reader.feed(data + chunk("tool_calls"))
    else:
        message = {"content": text or None, "reasoning_content": "Hm", "tool_calls": calls}
        reader.feed(document("tool_calls", **message))
    result = reader.result()
    assert result is not None and result.tool_calls == {
        "role": "assistant",
        "content": text or None,
        "reasoning_content": "Hm",
        "tool_calls": calls,
    }


# Texts that look like other parts of an event, and half of a surrogate pair.
ODD_TEXTS = ["", "\u00e9\n", '"', "\\", '","x":"', '},"logprobs":null', "delta", "\ud83d"]
TEXTS = st.sampled_from(ODD_TEXTS) | st.text(max_size=4)
TOKENS = st.lists(st.fixed_dictionaries({"token": TEXTS, "logprob": st.floats(-9, 0)}), max_size=2)
LOGPROBS = st.fixed_dictionaries({"content": TOKENS, "text": TEXTS}) | st.none()
DELTAS: list[st.SearchStrategy[dict[str, Any]]] = [
    st.fixed_dictionaries({"content": TEXTS, "reasoning": st.none(), "tool_calls": st.none()}),
    st.fixed_dictionaries({"content": st.none(), "reasoning": TEXTS, "tool_calls": st.none()}),
    st.fixed_dictionaries({"content": TEXTS, "reasoning": TEXTS}),
    st.fixed_dictionaries({"tool_calls": TEXTS.map(lambda x: [{"function": {"arguments": x}}])}),
]


@st.composite
def chunks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return the chunks of an answer; many chunks differ from the previous chunk in one field."""
    found: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        deltas = draw(st.sampled_from(DELTAS))
        indexes = draw(st.sampled_from([[0], [0], [0, 0], [0, 1]]))
        for length in draw(st.lists(st.integers(1, 2), max_size=6)):
            choices = [
                {"index": index, "delta": draw(deltas), "logprobs": draw(LOGPROBS), "stop": None}
                for index in indexes[:length]
            ]
            found.append({"choices": choices, "usage": None})
    return [*found, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


@given(chunks(), st.sampled_from([(",", ":"), (", ", ": ")]), st.lists(st.integers(0, 5000)))
def test_a_stream_is_read_as_its_chunks_add_up(
    chunks: list[dict[str, Any]], separators: tuple[str, str], cuts: list[int]
) -> None:
    events = [json.dumps(chunk, separators=separators) for chunk in chunks]
    pieces = [f"data: {event}\n\n".encode() for event in events]
    deltas = [
        [choice["delta"] for choice in chunk["choices"] if choice["index"] == 0] for chunk in chunks
    ]
    whole, cut = AnswerReader(is_stream=True), AnswerReader(is_stream=True)
    texts = ["".join(delta.get("content") or "" for delta in each) for each in deltas]
    assert list(map(whole.feed, pieces)) == texts
    sent = b"".join(pieces)
    places = sorted({0, *cuts, len(sent)})
    assert "".join(cut.feed(sent[a:b]) for a, b in pairwise(places)) == "".join(texts)
    result = whole.result()
    assert result is not None and result == cut.result()
    assert result.finish_reason == "stop"
    of_first = [delta for each in deltas for delta in each]
    reasoning = [delta["reasoning"] for delta in of_first if delta.get("reasoning") is not None]
    calls = [delta["tool_calls"][0] for delta in of_first if delta.get("tool_calls")]
    assert result.text == "".join(texts)
    reply = cast("dict[str, Any] | None", result.tool_calls)
    assert (reply is None) == (not calls)
    if reply is not None:
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert [call["function"]["arguments"] for call in reply["tool_calls"]] == [arguments]
        assert reply.get("reasoning", "") == "".join(reasoning)


def test_comments_and_late_events_are_no_text() -> None:
    reader = AnswerReader(is_stream=True)
    event = chunk(content="a")
    assert [reader.feed(event) for _ in range(3)] == ["a"] * 3
    assert [reader.feed(data) for data in (b": ", event, event)] == ["", "", "a"]
    assert [reader.feed(data) for data in (b"data: [DONE]\n\n", event)] == ["", ""]
