"""Thought is separated from the answer, however an engine cuts its output into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa import Thinking
from flashmoa.moa.thinking import ThoughtSplitter

TAGS = st.sampled_from([Thinking(), Thinking("[T]", "[/T]"), Thinking("aa", "aab")])
WORDS = st.text("ab<>/think \n[]T", max_size=20)


def split(
    output: str, cuts: list[int], tags: Thinking | None, *, inside: bool = False
) -> tuple[str, str]:
    """Return what was thought and what was answered of an output in pieces."""
    splitter = ThoughtSplitter(tags, inside=inside)
    ends = sorted({min(cut, len(output)) for cut in cuts} | {len(output)})
    begins = [0, *ends[:-1]]
    pieces = [output[begin:end] for begin, end in zip(begins, ends, strict=True)]
    answer = "".join(splitter.add(piece) for piece in pieces) + splitter.end()
    return splitter.thought, answer


def split_whole(output: str, tags: Thinking | None, *, inside: bool) -> tuple[str, str]:
    """Separate a whole output at once."""
    if tags is None:
        return "", output
    if not inside:
        if not output.lstrip().startswith(tags.opening):
            return "", output
        output = output.lstrip().removeprefix(tags.opening)
    thought, _, answer = output.partition(tags.closing)
    return thought, answer.lstrip()


@given(WORDS, WORDS, WORDS, st.lists(st.integers(0, 60)), TAGS, st.booleans())
def test_pieces_are_split_as_the_whole_output(
    before: str, thought: str, answer: str, cuts: list[int], tags: Thinking, inside: bool
) -> None:
    for output in (before, f"{before}{tags.opening}{thought}{tags.closing}{answer}"):
        assert split(output, cuts, tags, inside=inside) == split_whole(output, tags, inside=inside)
    assert split(answer, cuts, None) == ("", answer)


def test_pieces_of_an_answer_are_not_held_back() -> None:
    splitter = ThoughtSplitter(Thinking())
    assert [splitter.add(piece) for piece in ("Hello", " <think", ">")] == ["Hello", " <think", ">"]
    splitter = ThoughtSplitter(Thinking())
    assert [splitter.add(piece) for piece in (" <th", "ere")] == ["", " <there"]


def test_thought_without_an_end_leaves_no_answer() -> None:
    assert split("<think>What is it? </thin", [9, 20], Thinking()) == ("What is it? </thin", "")


def test_tags_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="give both"):
        Thinking("", "</think>")
