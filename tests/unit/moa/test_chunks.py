"""What becomes of an answer that is read in chunks when it does not end well."""

from __future__ import annotations

import pytest

from flashmoa.engine import EngineClient
from flashmoa.moa import Schedule
from flashmoa.moa.chunks import ChunkedText
from flashmoa.moa.prompts import last_words
from flashmoa.workflow import Answer, Workflow

pytestmark = pytest.mark.anyio


def chunks(flow: Workflow, answer: Answer) -> ChunkedText:
    return ChunkedText(flow, answer, "1. ", Schedule(first=1), stall_seconds=0.01)


async def test_one_that_stalls_is_read_as_far_as_it_is() -> None:
    async with EngineClient("http://127.0.0.1:9") as engine, Workflow(engine) as flow:
        answer = Answer("slow")
        answer.write("abcdef")
        cut = chunks(flow, answer)
        await cut.cut()
        assert [await cut.chunk(number) for number in range(3)] == ["1. abcd", "1. ef", ""]
        assert "nothing came for 0.01 s" in cut.problem and not cut.failed
        assert answer.is_over and not answer.is_complete


@pytest.mark.parametrize("error", [None, ValueError("no such model")])
async def test_one_that_says_nothing_has_failed(error: ValueError | None) -> None:
    async with EngineClient("http://127.0.0.1:9") as engine, Workflow(engine) as flow:
        answer = Answer("mute")
        answer.close() if error is None else answer.fail(error)
        cut = chunks(flow, answer)
        await cut.cut()
        assert cut.failed and cut.ends_before(0) and await cut.chunk(0) == ""
        assert cut.problem == ("it answered nothing" if error is None else "no such model")


@pytest.mark.parametrize("text", ["", "one", "one two ", " one two three four", "a\nb c  d"])
def test_last_words(text: str) -> None:
    end = last_words(text, 3)
    assert text.endswith(end) and end.split() == text.split()[-3:]
    assert last_words(text + "x" * 40, 3) == "x" * 30


async def test_a_prompt_has_one_version_of_an_answer() -> None:
    async with EngineClient("http://127.0.0.1:9") as engine, Workflow(engine) as flow:
        answer = Answer("writer")
        one, other = flow.version(answer), flow.version(answer)
        assert one.name == other.name == "writer"
        with pytest.raises(ValueError, match="two versions of one answer: writer, writer"):
            flow.ask([{"role": "user", "content": f"{one}{other}"}], name="reader")
