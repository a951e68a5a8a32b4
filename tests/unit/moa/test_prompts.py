"""Aggregators' prompts, the shares of answers in them, and the chunks of answers."""

from collections.abc import AsyncGenerator
from itertools import islice, pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import Text, Workflow
from flashmoa.engine import EngineClient
from flashmoa.errors import EngineTimeout
from flashmoa.moa import Steps
from flashmoa.moa.prompts import (
    AggregationPrompt,
    ChunkedText,
    conversation,
    fair_shares,
    transcript,
)
from tests.event_loop import own_task

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 1 + 1?"},
]


CALLS = [
    {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "function": {
        "name": "f", "arguments": "{}"}}]} for text in (None, "I look.")
]  # fmt: skip
RESULTS = [{"role": "tool", "tool_call_id": id_, "content": id_} for id_ in ("1", "2")]
messages = st.lists(st.sampled_from([*TALK[1:], *CALLS, *RESULTS]), max_size=8)


@given(question=messages.map(lambda found: [TALK[0], *found, TALK[-1]]), advises=st.booleans())
def test_a_transcript_has_every_text_and_no_tools(question: Any, *, advises: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] if advises else []
    found = transcript(question, tools)
    assert not any("tool_calls" in one or one["role"] == "tool" for one in found)
    texts = [one["content"] for one in question if one["content"]]
    text, place = "\n".join(one["content"] for one in found), 0
    for each in texts:
        place = text.index(each, place) + len(each)
    if not any("tool_calls" in one or one["role"] == "tool" for one in question):
        assert found[1:] == question[1:] and (advises or found == question)
    else:
        roles = [one["role"] for one in found]
        assert not any(pair == ("user", "user") for pair in pairwise(roles))
        assert roles[-1] == "user"
    assert ("- f: no description" in found[0]["content"]) == advises


def test_a_result_follows_its_own_call_though_ids_repeat() -> None:
    talk: list[Any] = []
    for town, degrees in (("Paris", "12 C"), ("Rome", "25 C")):
        call = {"id": "call_0", "function": {"name": "w", "arguments": town}}
        talk.append({"role": "user", "content": f"{town}?"})
        talk.append({"role": "assistant", "content": None, "tool_calls": [call]})
        talk.append({"role": "tool", "tool_call_id": "call_0", "content": degrees})
    [found] = transcript(talk, ())
    results = ["Result of w(Paris):\n12 C", "Result of w(Rome):\n25 C"]
    assert found["content"] == "\n\n".join(["Paris?", results[0], "Rome?", results[1]])


def test_an_empty_user_message_is_kept() -> None:
    talk = [*CALLS[:1], RESULTS[0], TALK[2], {"role": "user", "content": ""}]
    assert [one["role"] for one in transcript(talk, ())] == ["user", "assistant", "user"]
    tools = [{"type": "custom", "custom": {"name": "g"}}]
    system, last = transcript([CALLS[0], talk[-1]], tools)
    assert last == talk[-1] and "- g: no description" in system["content"]


def test_answers_first_is_the_system_message() -> None:
    prompt = AggregationPrompt("answers-first", "Weigh:", " [{number}] ")
    slots = [f"{prompt.title(number)}{text}" for number, text in ((1, "two"), (2, "{three}"))]
    first, *rest = prompt.messages(TALK, slots)
    assert first == {"role": "system", "content": "Be brief.\n\nWeigh: [1] two [2] {three}"}
    assert rest == TALK[1:]
    assert prompt.messages("Why?", [])[1] == {"role": "user", "content": "Why?"}


def test_question_first_puts_answers_at_the_end() -> None:
    prompt = AggregationPrompt("question-first", "Weigh:", "\n[{number}]", "\nNow you:")
    system, *talk = prompt.messages(TALK, [prompt.title(1), "two"])
    assert system["content"] == "Be brief.\n\nWeigh:"
    assert talk[:-1] == TALK[1:-1]
    assert talk[-1]["content"] == "What is 1 + 1?\n[1]two\nNow you:"


def test_question_must_end_with_a_user_message() -> None:
    for question in ([], [{"role": "assistant", "content": "Hello!"}], TALK[:1]):
        with pytest.raises(ValueError, match="last message"):
            AggregationPrompt().messages(question, [])


def test_a_questions_parts_are_a_text() -> None:
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    question = [{"role": "system", "content": parts}, {"role": "user", "content": "?"}]
    assert conversation(question)[0] == {"role": "system", "content": "Be brief.\nBe kind."}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": None, "content": "x"},
        {"role": "user", "content": 18},
        {"role": "system"},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ],
)
def test_a_question_without_roles_or_texts_is_refused(message: Any) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\] of the question has role"):
        conversation([{"role": "system", "content": "?"}, message])


@given(st.lists(st.integers(0, 50), max_size=9), st.integers(-5, 300))
def test_fair_shares_cut_the_longest(lengths: list[int], room: int) -> None:
    shares = fair_shares(lengths, room)
    assert sum(shares) <= max(0, room)
    assert all(0 <= share <= length for share, length in zip(shares, lengths, strict=True))
    cut = [share for share, length in zip(shares, lengths, strict=True) if share < length]
    if cut:
        # All cut answers are equally long, except for the remainder of the division.
        assert max(shares) - min(cut) <= 1 and sum(shares) == max(0, room)


@pytest.fixture
async def flow() -> AsyncGenerator[Workflow]:
    async with EngineClient("http://127.0.0.1:9") as engine, own_task(Workflow(engine)) as flow:
        yield flow


def test_chunks_grow_up_to_the_largest_chunk() -> None:
    assert list(islice(Steps().sizes(), 7)) == [8, 16, 32, 64, 128, 128, 128]
    assert list(islice(Steps(4, 1.5, 10).sizes(), 4)) == [4, 6, 9, 10]


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        # One token a part, whatever the number of its characters.
        ([1] * 14, [2, 4, 8, 0]),
        # A part stays whole: a chunk ends with the part that brings the chunk's last token.
        ([3, 3, 1, 9, 1], [1, 2, 1, 1]),
        # The last character of two tokens is a part after the token's first half.
        ([1, 0, 1, 4], [3, 1, 0]),
    ],
)
async def test_chunks_have_the_tokens_that_the_engine_counted(
    flow: Workflow, tokens: list[int], chunks: list[int]
) -> None:
    parts = [chr(97 + n) * (n + 1) for n in range(len(tokens))]
    answer = Text("p")
    proposal = ChunkedText(flow, answer, tokens, "1. ", Steps(first=2))
    async with anyio.create_task_group() as group:
        group.start_soon(proposal.cut)
        await anyio.wait_all_tasks_blocked()
        for part in parts:
            answer.write(part)
        answer.close()
    begins = [sum(chunks[:number]) for number in range(len(chunks))]
    for number, (begin, count) in enumerate(zip(begins, chunks, strict=True)):
        chunk = await proposal.chunk(number)
        assert chunk.removeprefix("1. ") == "".join(parts[begin : begin + count])
    count = len(chunks) - chunks.count(0)
    assert proposal.ends_before(count) and not proposal.ends_before(count - 1)


@pytest.mark.parametrize(
    ("text", "error", "chunks", "problem"),
    [
        # A stalled answer has the chunks written so far.
        (
            "abcdef",
            EngineTimeout("nothing came for 0.01 s"),
            ["1. a", "1. bc", "1. def", ""],
            "nothing",
        ),
        ("", None, [""], "it answered nothing"),
        ("", ValueError("no such model"), [""], "no such model"),
    ],
)
async def test_an_answer_that_is_not_whole_has_a_problem(
    flow: Workflow, text: str, error: Exception | None, chunks: list[str], problem: str
) -> None:
    answer = Text("p")
    proposal = ChunkedText(flow, answer, [1] * len(text), "1. ", Steps(first=1))
    async with anyio.create_task_group() as group:
        group.start_soon(proposal.cut)
        await anyio.wait_all_tasks_blocked()
        for letter in text:
            answer.write(letter)
        answer.close() if error is None else answer.fail(error)
    assert [await proposal.chunk(number) for number in range(len(chunks))] == chunks
    assert problem in proposal.problem
    assert proposal.failed == proposal.ends_before(0) == (not text)


async def test_prompt_refuses_two_versions_of_one_answer(flow: Workflow) -> None:
    answer = Text("writer")
    one, other = flow.version(answer), flow.version(answer)
    assert one.name == other.name == "writer"
    with pytest.raises(ValueError, match="two versions of one answer: writer, writer"):
        flow.ask([{"role": "user", "content": f"{one}{other}"}], name="reader")
