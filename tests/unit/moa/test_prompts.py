"""Aggregators' prompts, the shares of answers in them, and the chunks of answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import Text, Workflow
from flashmoa.engine import EngineClient
from flashmoa.errors import EngineTimeout
from flashmoa.moa import Steps
from flashmoa.moa.prompts import AggregationPrompt, ChunkedText, fair_shares

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 1 + 1?"},
]


def test_answers_first_is_the_system_message() -> None:
    prompt = AggregationPrompt(instruction="Weigh:", heading=" [{number}] ")
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
    async with EngineClient("http://127.0.0.1:9") as engine, Workflow(engine) as flow:
        yield flow


def test_chunks_grow_up_to_the_largest_chunk() -> None:
    assert list(islice(Steps().sizes(), 7)) == [8, 16, 32, 64, 128, 128, 128]
    assert list(islice(Steps(4, 1.5, 10).sizes(), 4)) == [4, 6, 9, 10]


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 7, 150])
async def test_chunks_do_not_depend_on_the_pieces(flow: Workflow, size: int) -> None:
    whole = "".join(chr(97 + n % 26) for n in range(150))
    answer = Text("p")
    for begin in range(0, len(whole), size):
        answer.write(whole[begin : begin + size])
    answer.close()
    proposal = ChunkedText(flow, answer, "1. ", Steps())
    await proposal.cut()
    chunks = [(await proposal.chunk(number)).removeprefix("1. ") for number in range(4)]
    assert [len(chunk) for chunk in chunks] == [32, 64, 54, 0]
    assert "".join(chunks) == whole
    assert proposal.ends_before(3) and not proposal.ends_before(2)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "error", "chunks", "problem"),
    [
        # A stalled answer has the chunks written so far.
        ("abcdef", EngineTimeout("nothing came for 0.01 s"), ["1. abcd", "1. ef", ""], "nothing"),
        ("", None, [""], "it answered nothing"),
        ("", ValueError("no such model"), [""], "no such model"),
    ],
)
async def test_an_answer_that_is_not_whole_has_a_problem(
    flow: Workflow, text: str, error: Exception | None, chunks: list[str], problem: str
) -> None:
    answer = Text("p")
    if text:
        answer.write(text)
    answer.close() if error is None else answer.fail(error)
    proposal = ChunkedText(flow, answer, "1. ", Steps(first=1))
    await proposal.cut()
    assert [await proposal.chunk(number) for number in range(len(chunks))] == chunks
    assert problem in proposal.problem
    assert proposal.failed == proposal.ends_before(0) == (not text)


@pytest.mark.anyio
async def test_prompt_refuses_two_versions_of_one_answer(flow: Workflow) -> None:
    answer = Text("writer")
    one, other = flow.version(answer), flow.version(answer)
    assert one.name == other.name == "writer"
    with pytest.raises(ValueError, match="two versions of one answer: writer, writer"):
        flow.ask([{"role": "user", "content": f"{one}{other}"}], name="reader")
