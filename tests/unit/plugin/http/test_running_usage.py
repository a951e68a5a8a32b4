"""Test that a chat which asks for its usage so far gets an event for each token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.http import running_usage
from hypothesis import given
from hypothesis import strategies as st

Output = dict[str, Any]


def decode(ids: Sequence[int], **_: Any) -> str:
    """Decode bytes; a text has no space at its beginning, as sentencepiece has none."""
    return bytes([*ids]).decode(errors="replace").removeprefix(" ")


def written(ids: bytes, is_first_kept: bool) -> str:
    """Return what SGLang sends of an answer so far: no part of a character."""
    text = ids.decode(errors="ignore")
    return text if is_first_kept else text.removeprefix(" ")


async def outputs(
    answer: bytes, ends: Sequence[int], *, in_pieces: bool, keeps: bool
) -> AsyncGenerator[Output]:
    begin, sent = 0, ""
    for end in ends:
        text = written(answer[:end], keeps)
        reason = {"type": "length"} if end == len(answer) else None
        meta = {"completion_tokens": end, "finish_reason": reason}
        yield {
            "text": text.removeprefix(sent) if in_pieces else text,
            "output_ids": [*answer[begin if in_pieces else 0 : end]],
            "meta_info": meta,
        }
        begin, sent = end, text


def progress(
    answer: bytes, ends: Sequence[int], *, in_pieces: bool, keeps: bool
) -> list[tuple[str, int]]:
    """Return each new text of the split outputs, with the tokens that have come with it."""
    found: list[tuple[str, int]] = []

    async def read() -> None:
        given = outputs(answer, ends, in_pieces=in_pieces, keeps=keeps)
        text = ""
        async for output in running_usage.split(given, decode, in_pieces=in_pieces):
            before, meta = text, output["meta_info"]
            text = before + output["text"] if in_pieces else output["text"]
            if text != before:
                found.append((text, meta["completion_tokens"]))
        assert meta["completion_tokens"] == len(answer) and meta["finish_reason"] is not None
        assert text == written(answer, keeps)

    anyio.run(read)
    return found


@given(
    st.text("ab é🙂", min_size=1, max_size=8),
    st.sets(st.integers(1, 30)),
    st.booleans(),
    st.booleans(),
)
def test_joined_outputs_are_split_at_their_tokens(
    text: str, cuts: set[int], in_pieces: bool, keeps: bool
) -> None:
    answer = text.encode()
    one_by_one = range(1, len(answer) + 1)
    joined = sorted({*(cut for cut in cuts if cut < len(answer)), len(answer)})
    assert progress(answer, joined, in_pieces=in_pieces, keeps=keeps) == progress(
        answer, one_by_one, in_pieces=in_pieces, keeps=keeps
    )


def test_text_after_a_stop_text_is_not_sent() -> None:
    async def read() -> list[str]:
        async def stopped() -> AsyncGenerator[Output]:
            meta = {"completion_tokens": 6, "finish_reason": {"type": "stop"}}
            yield {"text": "ab", "output_ids": [*b"abSTOP"], "meta_info": meta}

        split = running_usage.split(stopped(), decode, in_pieces=False)
        return [output["text"] async for output in split]

    assert anyio.run(read) == ["a", "ab", "ab"]


@pytest.mark.parametrize(
    ("change", "applies"),
    [
        ({}, True),
        ({"stream": False}, False),
        ({"return_logprob": True}, False),
        ({"sampling_params": {"n": 2}}, False),
        ({"options": None}, False),
        ({"options": SimpleNamespace(continuous_usage_stats=False)}, False),
    ],
)
def test_only_a_stream_that_asks_for_running_usage_is_split(
    change: dict[str, Any], applies: bool
) -> None:
    options = change.pop("options", SimpleNamespace(continuous_usage_stats=True))
    fields = {"stream": True, "return_logprob": False, "sampling_params": {}, **change}
    obj, chat = SimpleNamespace(**fields), SimpleNamespace(stream_options=options)
    given = object()
    table = SimpleNamespace(engine=SimpleNamespace(streams_pieces=lambda _obj: False))
    manager = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode), flashmoa_table=table)
    assert (running_usage.watch(manager, obj, chat, given) is not given) == applies
    assert running_usage.watch(manager, obj, None, given) is given
    assert running_usage.watch(SimpleNamespace(tokenizer=None), obj, chat, given) is given
    embedding = SimpleNamespace(text="a")
    assert running_usage.watch(manager, embedding, None, given) is given
