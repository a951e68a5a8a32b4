"""Bodies of requests are changed in place, and stay JSON of the same fields."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashmoa.openai_requests import change_body, read_body

# With halves of surrogate pairs, and with what stands in place of another field.
TEXTS = st.text(max_size=8) | st.sampled_from(["\ud800", '"stream":false', '{"stream":false}'])
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"content": TEXTS}), max_size=3)},
    optional={
        "stream": st.booleans() | st.none(),
        "tools": st.just([{"stream": False}]),
        "stream_options": st.just({"include_usage": False}),
    },
)
ADDED = st.dictionaries(st.sampled_from(["prompt_stream_id", "stream", "stream_options"]), TEXTS)


# The only `"stream":false` is that of a tool.
@example(
    {"messages": [], "stream": True, "tools": [{"stream": False}]},
    {"prompt_stream_id": "s", "stream": "on"},
    (",", ":"),
    True,
)
@given(BODIES, ADDED, st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_a_changed_body_has_its_fields_and_the_new_ones(
    body: dict[str, Any], added: dict[str, Any], separators: tuple[str, str], is_ascii: bool
) -> None:
    text = json.dumps(body, ensure_ascii=is_ascii, separators=separators)
    content = text.encode(errors="surrogatepass")
    url = "http://engine/v1/chat/completions"
    read = read_body(httpx.Request("POST", url, content=content))
    if not is_ascii and "\ud800" in text:
        assert read is None
        return
    assert read == body
    if body.get("stream") is False and "stream" in added:
        added["stream"] = True
    changed = {**read, **added}
    assert json.loads(change_body(content, read, changed)) == changed


def test_a_prompt_is_not_encoded_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"content": "a long prompt"}], "stream": False}
    content = json.dumps(body, separators=(",", ":")).encode()
    encoded: list[Any] = []
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda x, **o: [encoded.append(x), dumps(x, **o)][1])
    changed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert json.loads(change_body(content, body, changed)) == changed
    assert encoded == [{"stream_options": {"include_usage": True}}]
