"""What the plugin says of bodies that do not fit; without engines."""

from typing import Annotated, Any, Literal

import pytest
from flashmoa_sglang.http.errors import explain, shown
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError


def keep(value: Any) -> Any:
    return value


class UserMessage(BaseModel):
    role: Literal["user"]
    content: str | list[int]


class OtherMessage(BaseModel):
    role: Literal["system", "assistant"]
    content: str


ROLE = "messages.0.role: Input should be 'system' or 'assistant'; messages.0.content: "


class Chat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[Annotated[OtherMessage, AfterValidator(keep)] | UserMessage]
    top_k: int | bool = 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [5]}, "messages.0: Input should be a valid object."),
        ({"messages": [{"role": "user"}]}, f"{ROLE}Field required."),
        (
            {"messages": [{"role": "user", "content": 5}]},
            ROLE + "Input should be a valid string; messages.0.content: Input should be a valid "
            "list.",
        ),
        (
            {"messages": [], "top_k": "many"},
            "top_k: Input should be a valid integer, unable to parse string as an integer; top_k: "
            "Input should be a valid boolean, unable to interpret input.",
        ),
        ({"messages": [], "Prompt-2": 1}, "Prompt-2: Extra inputs are not permitted."),
        ({"messages": [], "x" * 999: 1}, "x" * 40 + ": Extra inputs are not permitted."),
    ],
)
def test_places_are_named_without_the_tried_types(body: Any, expected: str) -> None:
    """As in SGLang's chats, whose messages fit one of several models."""
    with pytest.raises(ValidationError) as raised:
        Chat.model_validate(body)
    assert explain(raised.value) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=json_values, levels=st.integers(0, 3000))
def test_a_value_is_shown_in_few_characters(value: Any, levels: int) -> None:
    for _ in range(levels):
        value = [value]
    assert 0 < len(shown(value)) <= 40


def test_a_short_value_is_shown_whole() -> None:
    for value in ("x", 7, 1.5, None, [1, "a"], {"a": 1}):
        assert shown(value) == repr(value)
