"""The parts that let clients hear answers, without an engine."""

import asyncio
import json
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.http.hearing.call import HeardCall
from flashmoa_sglang.http.hearing.channel import Channel
from flashmoa_sglang.http.hearing.written_text import WrittenText
from flashmoa_sglang.messages import HearAnswers
from flashmoa_sglang.scheduler.written import WrittenAnswers
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.http.fakes import decode

Line = dict[str, Any]


def as_bytes(ids: Sequence[int]) -> bytes:
    return array("q", [*ids]).tobytes()


@given(st.text(max_size=12), st.binary(max_size=30), st.data())
def test_text_grows_to_that_of_all_tokens(prompt: str, answer: bytes, data: st.DataObject) -> None:
    before = prompt.encode(errors="surrogatepass")[-5:]
    text, place = WrittenText(decode), 0
    whole = decode([*before, *answer])[len(decode(before)) :]
    while place < len(answer):
        end = data.draw(st.integers(place + 1, len(answer)))
        new = [*(before if place == 0 else b""), *answer[place:end]]
        text.add(as_bytes(new), len(before) if place == 0 else 0)
        place = end
        assert text.tokens == end
    # Bytes that are no character may hold back the text after them.
    if "\ufffd" not in decode(before) + whole:
        assert text.text == whole


def request(rid: str, written: int, **more: Any) -> Any:
    return SimpleNamespace(
        rid=rid,
        output_ids=list(range(written)),
        origin_input_ids_unpadded=array("q", range(100, 120)),
        finished=lambda: more.get("is_finished", False),
        check_match_stop_str_prefix=lambda: more.get("may_stop", False),
    )


def told(message: Any) -> dict[str, tuple[list[int], int]]:
    answers = message.answers if message is not None else ()
    return {rid: ([*array("q", ids)], before) for rid, ids, before in answers}


def hearing(*begun: str, slowdown: float = 1.0) -> WrittenAnswers:
    answers = WrittenAnswers(slowdown)
    answers.hear(HearAnswers(begun=begun))
    return answers


def test_only_new_tokens_of_heard_requests_are_told() -> None:
    answers = WrittenAnswers()
    assert answers.news([request("a", 3)], 0.0) is None
    answers.hear(HearAnswers(begun=("a", "b", "never")))
    first = answers.news([request("a", 2), request("b", 0), request("other", 5)], 1.0)
    assert told(first) == {"a": ([115, 116, 117, 118, 119, 0, 1], 5)}
    later = answers.news([request("a", 3), request("b", 1)], 2.0)
    assert told(later) == {"a": ([2], 0), "b": ([115, 116, 117, 118, 119, 0], 5)}
    assert answers.news([request("a", 3), request("b", 1)], 3.0) is None
    answers.hear(HearAnswers(ended=("a", "never", "unknown")))
    assert told(answers.news([request("a", 9), request("b", 2)], 4.0)) == {"b": ([1], 0)}


def test_a_slowed_down_device_lengthens_the_interval() -> None:
    for slowdown in (1.0, 4.0):
        answers = hearing("a", slowdown=slowdown)
        assert answers.news([request("a", 1)], 10.0)
        assert answers.news([request("a", 2)], 10.0 + slowdown * 0.02) is None
        assert told(answers.news([request("a", 3)], 10.0 + slowdown * 0.03)) == {"a": ([1, 2], 0)}


def test_an_end_and_possible_stop_strings_are_not_told() -> None:
    reqs = [request("a", 4, is_finished=True), request("b", 4, may_stop=True)]
    assert hearing("a", "b").news(reqs, 1.0) is None


async def test_texts_that_wait_are_joined_and_keep_their_order() -> None:
    channel = Channel()
    lines = channel.lines()
    assert json.loads(await anext(lines)) == {"listening": True}
    yes, no = {"call": "b", "content": "Yes", "at": 7}, {"call": "a", "content": "\ud800", "at": 0}
    thought, end = {"call": "a", "reasoning": "Hm", "at": 0}, {"call": "b", "end": "stop"}
    for line in (thought, yes, {"call": "a", "reasoning": ".", "at": 2}, no, end):
        channel.tell(line)
    told = [json.loads(line) for line in (await anext(lines)).splitlines()]
    assert told == [{**thought, "reasoning": "Hm."}, yes, no, end]
    channel.close()
    assert [line async for line in lines] == []


async def test_a_channel_without_news_says_that_it_is_open() -> None:
    lines = Channel(idle_seconds=0.001).lines()
    await anext(lines)
    assert await anext(lines) == b"\n"


async def test_a_client_that_does_not_read_loses_its_channel() -> None:
    channel = Channel(max_waiting=10)
    channel.tell({"call": "a", "content": "0123456789", "at": 0})
    assert not channel.is_closed
    channel.tell({"call": "a", "tool": "look"})
    assert channel.is_closed
    channel.tell({"call": "a", "content": "more", "at": 10})
    lines = channel.lines()
    assert [line async for line in lines][1:] == []


def output(text: str, reason: str | None = None) -> Line:
    finish = {"type": reason} if reason else None
    return {"text": text, "meta_info": {"id": "r", "finish_reason": finish, "completion_tokens": 2}}


async def hear(call: HeardCall, notes: Sequence[Line]) -> list[Line]:
    """Return the lines of a call without parsers."""
    lines: list[Line] = []
    task = asyncio.create_task(call.run(None, lines.append))
    for note in notes:
        await asyncio.sleep(0)
        call.note_output(note)
    call.end()
    await task
    return lines


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_streamed_outputs_are_told_in_both_forms(in_pieces: bool) -> None:
    first, second, last = ("A", "b", ".") if in_pieces else ("A", "Ab", "Ab.")
    notes = [output(first), output(second), output(last, "stop")]
    lines = await hear(HeardCall("c", None, in_pieces=in_pieces), notes)
    assert "".join(line.get("text", "") for line in lines) == "Ab."
    assert lines[-1] == {"call": "c", "end": "stop", "usage": {"completion_tokens": 2}}


async def test_a_whole_answer_continues_what_was_told_of_it() -> None:
    call = HeardCall("c", WrittenText(decode), in_pieces=True)
    call.note_tokens(as_bytes(b"x y"), 1)
    lines = await hear(call, [output(" y z", "length")])
    assert "".join(line.get("text", "") for line in lines) == " y z"
    call.note_tokens(as_bytes(b"too late"), 0)
    assert lines[-1]["end"] == "length"


async def test_a_request_without_an_answer_ends_without_a_reason() -> None:
    assert await hear(HeardCall("c", None, in_pieces=False), []) == [{"call": "c", "end": None}]
    begun = await hear(HeardCall("c", None, in_pieces=False), [output("A")])
    assert begun[-1] == {"call": "c", "end": None, "usage": {"completion_tokens": 2}}
