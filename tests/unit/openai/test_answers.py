"""Test that answers are read from the bytes of responses, however these are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashmoa.openai_answers import AnswerReader


def chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


STREAM = chunk(content="Hé") + chunk(content="llo") + chunk("stop") + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_the_text_of_a_stream_does_not_depend_on_how_it_is_cut(cuts: list[int]) -> None:
    reader, places = AnswerReader(is_stream=True), sorted({0, *cuts, len(STREAM)})
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    assert "".join(map(reader.feed, pieces)) == "Héllo"
    result = reader.result()
    assert reader.is_over and result is not None
    assert (result.text, result.finish_reason, result.is_forwarded) == ("Héllo", "stop", True)


def test_a_stream_that_breaks_off_has_no_result() -> None:
    reader = AnswerReader(is_stream=True)
    assert reader.feed(chunk(content="Hello")) == "Hello"
    assert reader.result() is None and "not read to its end" in reader.problem


def test_null_in_place_of_parts_of_a_chunk_is_no_problem() -> None:
    reader = AnswerReader(is_stream=True)
    problem = reader.problem
    odd = [
        {},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"delta": None}], "usage": None},
    ]
    data = [b"data:\n\n", *(f"data: {json.dumps(event)}\n\n".encode() for event in odd)]
    text = "".join(map(reader.feed, [chunk(content="Hé"), *data, chunk(content="llo")]))
    assert text == "Héllo" and reader.problem == problem
    reader.feed(b'data: {"choices": [{"finish_reason":\r\ndata: "stop", "delta": null}]}\r\n')
    result = reader.result()
    assert result is not None and result.text == text


def test_the_error_in_a_stream_is_its_problem() -> None:
    reader = AnswerReader(is_stream=True)
    reader.feed(b'data: {"error": {"message": "no memory"}}\n\n')
    assert reader.result() is None and "no memory" in reader.problem


def test_bytes_that_are_no_answer_are_a_problem() -> None:
    reader = AnswerReader(is_stream=False)
    assert reader.feed(b"<html>") == ""
    assert reader.result() is None and "<html>" in reader.problem


def test_a_tool_call_is_not_forwarded() -> None:
    reader = AnswerReader(is_stream=True)
    reader.feed(chunk(content="I look.") + chunk("tool_calls", tool_calls=[{"index": 0}]))
    result = reader.result()
    assert result is not None and not result.is_forwarded


def test_a_whole_answer_is_read_with_its_usage() -> None:
    message = {"index": 0, "message": {"content": "Hello"}, "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    reader = AnswerReader(is_stream=False)
    assert reader.feed(json.dumps({"choices": [message], "usage": usage}).encode()) == "Hello"
    result = reader.result()
    assert result is not None and result.usage is not None
    assert (result.usage.prompt_tokens, result.finish_reason) == (3, "length")


@given(st.booleans())
def test_the_text_of_an_answer_in_parts_is_read(is_stream: bool) -> None:
    parts = [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Hé"}, "llo"]
    reader = AnswerReader(is_stream=is_stream)
    if is_stream:
        text = reader.feed(chunk(content=parts[:2]) + chunk("stop", content=parts[2:]))
    else:
        choice = {"index": 0, "message": {"content": parts}, "finish_reason": "stop"}
        text = reader.feed(json.dumps({"choices": [choice]}).encode())
    result = reader.result()
    assert result is not None and result.is_forwarded
    assert text == result.text == "Héllo"


@given(st.booleans(), st.booleans(), st.sampled_from(["", "I look. "]))
def test_an_answer_that_calls_tools_is_the_message_that_agents_send_back(
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
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        reader.feed(json.dumps({"choices": [choice]}).encode())
    result = reader.result()
    assert result is not None and result.tool_calls == {
        "role": "assistant",
        "content": text or None,
        "reasoning_content": "Hm",
        "tool_calls": calls,
    }
