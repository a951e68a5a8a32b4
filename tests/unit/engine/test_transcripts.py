"""Test chat requests that are written as one text, cut anywhere and read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import MalformedRequest, transcripts

FIELDS: dict[str, Any] = {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": "é"}}
TEXTS = st.text(st.characters(exclude_characters="\x00\x01\x02\x03\n"), max_size=20)
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS},
        optional={"name": TEXTS},
    ),
    max_size=4,
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}


@given(MESSAGES)
def test_a_whole_transcript_is_the_request(messages: list[dict[str, Any]]) -> None:
    end = {"role": "user", "content": "end"}
    transcript = transcripts.encode([*messages, CALL, end], FIELDS)
    assert transcripts.is_transcript(transcript)
    assert transcripts.decode(transcript) == {**FIELDS, "messages": [*messages, CALL, end]}


@given(MESSAGES, st.data())
def test_the_beginning_of_a_transcript_is_the_beginning_of_the_request(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    head = len(transcripts.encode([], FIELDS))
    transcript = transcripts.encode(messages, FIELDS)
    cut = data.draw(st.integers(head, len(transcript)))
    got: list[dict[str, Any]] = transcripts.decode(transcript[:cut])["messages"]
    assert got[:-1] == messages[: max(0, len(got) - 1)]
    if got:
        last, whole = got[-1], messages[len(got) - 1]
        assert {**last, "content": ""} == {**whole, "content": ""}
        assert _text(last["content"]).strip("\n"), "a message without text is not sent"
        assert _text(whole["content"]).startswith(_text(last["content"]))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def test_a_message_with_an_image_is_refused() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "u"}}]
    with pytest.raises(MalformedRequest, match="images"):
        transcripts.encode([{"role": "user", "content": parts}], {})


def test_a_message_with_the_separator_is_refused() -> None:
    with pytest.raises(MalformedRequest):
        transcripts.encode([{"role": "user", "content": "a\x00b"}], {})


def test_rendered_text_is_not_a_transcript() -> None:
    assert not transcripts.is_transcript("<|im_start|>user\nhi")
    assert not transcripts.is_transcript("")
