"""The bodies of chat completions: fields are used, passed on or refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa.serve.chat_completions import ChatQuestion, ChatRequestRefused, parse_object
from flashmoa.moa.settings import Sampling

QUESTION = [{"role": "user", "content": "Why?"}]
ACCOUNT = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user"}
TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
OPTIONS = {"messages", "model", "stream", "stream_options", "flashmoa"}
KNOWN = {*Sampling.model_fields, *ACCOUNT, *TOOLS, *OPTIONS}


def parse(**body: Any) -> ChatQuestion:
    return ChatQuestion.parse({"messages": QUESTION, **body})


def refusal(**body: Any) -> ChatRequestRefused:
    with pytest.raises(ChatRequestRefused) as refused:
        parse(**body)
    return refused.value


@pytest.mark.parametrize(("older", "newer"), [(5, 7), (7, 5)])
def test_both_names_of_max_tokens_are_kept_to(older: int, newer: int) -> None:
    given = parse(max_tokens=older, max_completion_tokens=newer).parameters
    assert given == {"max_tokens": 5}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=3,
)
known_fields = st.sampled_from(sorted({*KNOWN, "n", "logprobs"}))


@given(body=st.dictionaries(known_fields | st.text(max_size=5), json_values, max_size=4))
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        chat = ChatQuestion.parse(parse_object(json.dumps(body).encode()))
    except ChatRequestRefused as error:
        assert error.status == 400 and str(error)
    else:
        assert chat.messages


@given(name=st.text(min_size=1).filter(lambda name: name not in KNOWN))
def test_no_unknown_field_is_ignored(name: str) -> None:
    error = refusal(**{name: {"some": "value"}})
    assert error.param == name


@given(content=st.binary(max_size=40))
def test_any_bytes_are_refused_in_the_same_way(content: bytes) -> None:
    with pytest.raises(ChatRequestRefused, match=r"^(the body is not|messages is missing)"):
        ChatQuestion.parse(parse_object(content))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{}", "messages is missing; send an object with messages"),
        (b"[]", "(it is a JSON list); send an object with a question"),
        (b"no", "(JSONDecodeError: Expecting value"),
        (b'{"temperature": NaN}', "NaN is not a number in JSON"),
        (b'{"logit_bias": {"7": 1e999}}', "Out of range float values"),
        (b'{"user": "\\ud800"}', "UnicodeEncodeError"),
        (b"[" * 100_000, "RecursionError"),
    ],
)
def test_a_body_that_is_no_request_is_named(content: bytes, problem: str) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        ChatQuestion.parse(parse_object(content))
    assert problem in str(refused.value)


UNKNOWN = "unknown_parameter"


@pytest.mark.parametrize(
    ("name", "value", "code", "problem"),
    [
        ("temprature", 1, UNKNOWN, "did you mean 'temperature'?"),
        ("features", {}, UNKNOWN, "there is no field 'features'"),
        ("temperature", 3, None, "temperature is 3: Input should be less"),
        ("temperature", "hot", None, "Input should be a valid number"),
        ("max_tokens", 0, None, "greater than or equal to 1"),
        ("response_format", {"type": "xml"}, None, "'json_object'"),
        ("stream_options", {}, None, "send it, too"),
        ("stream_options", {"include_usag": True}, UNKNOWN, "did you mean 'include_usage'?"),
        ("flashmoa", {"show_answer": True}, UNKNOWN, "did you mean 'show_answers'?"),
        ("tool_choice", "required", None, "there are no tools; give tools"),
    ],
)
def test_a_field_that_none_can_follow_is_refused(
    name: str, value: Any, code: str | None, problem: str
) -> None:
    error = refusal(**{name: value, **({"stream": True} if value and "stream" in name else {})})
    assert (error.param, error.code, error.status) == (name, code, 400)
    assert problem in str(error)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    neutral = {"n": 1, "logprobs": False, "top_logprobs": None, "modalities": ["text"]}
    neutral |= {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto"}
    neutral |= {"parallel_tool_calls": True}
    assert parse(**neutral, store=False).parameters == {}


def test_options_that_are_left_out_leave_the_files() -> None:
    assert parse(flashmoa={}).shows_answers is None
    assert parse(flashmoa={"show_answers": False}).shows_answers is False


def test_parts_and_developers_are_converted() -> None:
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "not?"}]
    chat = parse(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "Ada"},
        ]
    )
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why\nnot?", "name": "Ada"},
    ]


def test_calls_of_tools_and_their_results_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    parsed = parse(messages=[*QUESTION, asked, result]).messages
    assert parsed == [*QUESTION, {**asked, "content": ""}, result]


NO_NAME = "names no function; give it a function with a name"


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({"id": "a", "function": {"arguments": "{}"}}, "0.function.name: Field required"),
        ({"id": "a", "function": "f"}, '0.function is "f"'),
        ({"id": [], "function": {"name": "f"}}, "0.id is []"),
        ({"id": "a"}, f'0 is {{"id": "a"}}: it {NO_NAME}'),
    ],
)
def test_malformed_calls_and_tools_are_named(call: dict[str, Any], problem: str) -> None:
    error = refusal(messages=[{"role": "assistant", "tool_calls": [call]}, *QUESTION])
    assert error.param == "messages" and f"messages.0.tool_calls.{problem}" in str(error)
    if call["id"]:
        error = refusal(tools=[call])
        assert error.param == "tools" and f"tools.{problem}" in str(error)
    error = refusal(messages=[{"role": "tool", "tool_call_id": [], "content": "x"}])
    assert "messages.0.tool_call_id is []" in str(error)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("role", "content", "problem"),
    [
        (None, None, "messages is []"),
        ("user", None, "messages.0 has no content"),
        ("assistant", "?", "the last message has role 'assistant'"),
        ("critic", "?", 'messages.0.role is "critic"'),
        ("user", [{"type": "text"}], "messages.0.content.0 has no text"),
        ("user", [IMAGE], 'messages.0.content.0 has type "image_url"'),
    ],
)
def test_messages_without_an_answer_are_refused(
    role: str | None, content: Any, problem: str
) -> None:
    error = refusal(messages=[{"role": role, "content": content}] if role else [])
    assert error.param == "messages" and problem in str(error)
