"""Test that requests of the Responses API are read as messages, and written as they were."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.link.prompt import NotForecastable
from flashmoa.link.response_items import (
    as_chat,
    read_messages,
    response_fields,
    write_messages,
)

TEXTS = st.text(min_size=1, max_size=4)
IDS = st.fixed_dictionaries({}, optional={"id": TEXTS, "status": st.just("completed")})


def part(kind: str) -> st.SearchStrategy[Any]:
    """Parts of a content, some with fields that a model is not shown."""
    more = {"annotations": st.just([]), "logprobs": st.just([])}
    return st.fixed_dictionaries({"type": st.just(kind), "text": TEXTS}, optional=more)


def contents(kind: str) -> st.SearchStrategy[Any]:
    return TEXTS | st.lists(part(kind), max_size=2)


def item(fields: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
    shown = st.fixed_dictionaries(fields, optional=optional)
    return st.tuples(shown, IDS).map(lambda both: {**both[0], **both[1]})


IS_MESSAGE = {"type": st.just("message")}
USERS = st.sampled_from(["user", "developer", "system"])
CALL = dict.fromkeys(("call_id", "name", "arguments"), TEXTS)
RESULT = {"call_id": TEXTS, "output": contents("input_text")}
SUMMARY = st.lists(part("summary_text"), max_size=1)
ITEMS = st.lists(
    st.one_of(
        item({"role": USERS, "content": contents("input_text")}, **IS_MESSAGE),
        item({"role": st.just("assistant"), "content": contents("output_text")}, **IS_MESSAGE),
        item({"type": st.just("function_call"), **CALL}),
        item({"type": st.just("function_call_output"), **RESULT}),
        item({"type": st.just("reasoning"), "summary": SUMMARY}),
    ),
    max_size=6,
)


def shown(value: Any) -> Any:
    """Return items without what a model is not shown: a naive oracle."""
    if isinstance(value, list):
        return [shown(each) for each in value]
    if not isinstance(value, dict):
        return value
    hidden = {"id", "status", "annotations", "logprobs"}
    kept = {key: shown(each) for key, each in value.items() if key not in hidden}
    return {key: each for key, each in kept.items() if (key, each) != ("type", "message")}


@given(ITEMS, st.none() | TEXTS)
def test_requests_are_written_as_they_were_read(items: list[Any], guide: str | None) -> None:
    body = {"input": items} if guide is None else {"input": items, "instructions": guide}
    written = write_messages(read_messages(body))
    assert written.get("instructions") == (guide or None)
    assert shown(written["input"]) == shown(items)
    # The ids of items differ from run to run.
    assert read_messages(written) == read_messages(body)


def test_a_turn_is_one_message() -> None:
    calls = [
        {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in "ab"
    ]
    text = {"type": "output_text", "text": "So.", "annotations": []}
    said = {"type": "message", "role": "assistant", "id": "msg_1", "content": [text]}
    results = [{"type": "function_call_output", "call_id": name, "output": "1"} for name in "ab"]
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    body = {"instructions": "Look.", "input": [thought, said, *calls, *results]}
    first, turn, *rest = read_messages(body)
    assert first == {"role": "instructions", "content": "Look."}
    assert turn["content"] == [{"type": "output_text", "text": "So."}]
    assert [call["id"] for call in turn["tool_calls"]] == ["a", "b"]
    assert [message["role"] for message in rest] == ["tool", "tool"]


def test_a_text_is_a_users_message() -> None:
    body = {"input": "Plan.", "tools": [], "reasoning": {"effort": "low"}, "temperature": 0}
    assert read_messages(body) == [{"role": "user", "content": "Plan."}]
    assert response_fields(body) == {"reasoning": {"effort": "low"}}


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Go on.", "previous_response_id": "resp_1"},
        {"input": "Go on.", "conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"input": None},
        {"input": ["text"]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]},
    ],
)
def test_a_prompt_beyond_its_request_is_unknown(body: dict[str, Any]) -> None:
    with pytest.raises(NotForecastable):
        read_messages(body)
    assert isinstance(as_chat(body)["messages"], list)
