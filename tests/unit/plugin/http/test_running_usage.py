"""Test that a chat which asks for its usage so far gets an event for each token."""

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from flashmoa_sglang.http import running_usage
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.http.fakes import decode

Output = dict[str, Any]


def written(ids: bytes, is_first_kept: bool) -> str:
    """Return what SGLang sends of an answer so far: no part of a character."""
    text = ids.decode(errors="ignore")
    return text if is_first_kept else text.removeprefix(" ")


async def outputs(answer: bytes, ends: Sequence[int], *, keeps: bool) -> AsyncGenerator[Output]:
    for end in ends:
        reason = {"type": "length"} if end == len(answer) else None
        meta = {"completion_tokens": end, "finish_reason": reason}
        text = written(answer[:end], keeps)
        yield {"text": text, "output_ids": [*answer[:end]], "meta_info": meta}


def progress(answer: bytes, ends: Sequence[int], *, keeps: bool) -> list[tuple[str, int]]:
    """Return each new text of the split outputs, with the tokens that have come with it."""
    found: list[tuple[str, int]] = []

    async def read() -> None:
        given = outputs(answer, ends, keeps=keeps)
        text = ""
        async for output in running_usage.split(given, decode):
            before, meta = text, output["meta_info"]
            text = output["text"]
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
)
def test_joined_outputs_are_split_at_their_tokens(text: str, cuts: set[int], keeps: bool) -> None:
    answer = text.encode()
    one_by_one = range(1, len(answer) + 1)
    joined = sorted({*(cut for cut in cuts if cut < len(answer)), len(answer)})
    assert progress(answer, joined, keeps=keeps) == progress(answer, one_by_one, keeps=keeps)


def test_text_after_a_stop_text_is_not_sent() -> None:
    async def read() -> list[str]:
        async def stopped() -> AsyncGenerator[Output]:
            meta = {"completion_tokens": 6, "finish_reason": {"type": "stop"}}
            yield {"text": "ab", "output_ids": [*b"abSTOP"], "meta_info": meta}

        split = running_usage.split(stopped(), decode)
        return [output["text"] async for output in split]

    assert anyio.run(read) == ["a", "ab", "ab"]


async def test_a_failing_tokenizer_fails_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Sequence[int]) -> str:
        raise KeyError(7)

    whole = [output async for output in outputs(b"abc", [2, 3], keeps=True)]
    given = outputs(b"abc", [2, 3], keeps=True)
    assert [output async for output in running_usage.split(given, fail)] == whole
    assert caplog.text.count("KeyError(7)") == 1


RUNNING = SimpleNamespace(continuous_usage_stats=True)
COUNTED_AT_END = SimpleNamespace(continuous_usage_stats=False)


@pytest.mark.parametrize(
    ("path", "options", "change", "applies"),
    [
        ("/v1/chat/completions", RUNNING, {}, True),
        ("/v1/messages", RUNNING, {}, False),
        ("/v1/chat/completions", RUNNING, {"stream": False}, False),
        ("/v1/chat/completions", RUNNING, {"return_logprob": True}, False),
        ("/v1/chat/completions", RUNNING, {"sampling_params": {"n": 2}}, False),
        ("/v1/chat/completions", None, {}, False),
        ("/v1/chat/completions", COUNTED_AT_END, {}, False),
    ],
)
def test_only_a_chat_that_asks_for_running_usage_is_split(
    path: str, options: object, change: dict[str, Any], applies: bool
) -> None:
    fields = {"stream": True, "return_logprob": False, "sampling_params": {}, **change}
    obj, chat = SimpleNamespace(**fields), SimpleNamespace(stream_options=options)
    request = SimpleNamespace(url=SimpleNamespace(path=path))
    table = SimpleNamespace(engine=SimpleNamespace(streams_pieces=lambda _obj: False))
    manager = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode), flashmoa_table=table)
    outputs = object()
    assert (running_usage.watch(manager, obj, chat, request, outputs) is not outputs) == applies
    for other, asked in ((obj, None), (SimpleNamespace(text="an embedding"), None)):
        assert running_usage.watch(manager, other, asked, request, outputs) is outputs
    # SGLang serves chats over gRPC with requests that have no URL.
    assert running_usage.watch(manager, obj, chat, SimpleNamespace(), outputs) is outputs
    table.engine.streams_pieces = lambda _obj: True
    assert running_usage.watch(manager, obj, chat, request, outputs) is outputs
