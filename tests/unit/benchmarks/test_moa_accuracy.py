"""Test how ``flashmoa bench moa-accuracy`` reads questions, answers and command lines."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from flashmoa_bench.moa.accuracy import Question, find_number, read, summarise


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("3 x 4 = 12, so \\boxed{12} apples in 2 bags.", "12"),
        ("\\boxed{1} at first, but no: \\boxed{\\$1,234.50}", "1234.50"),
        ("2 + 2 = 4\n#### -4", "-4"),
        ("The answer is **42**. I am sure, by 99 %.", "42"),
        ("First 7 of them, then 9.", "9"),
        ("<think>It is \\boxed{1}.</think> It is 2.", "2"),
        ("\\boxed{many}", None),
        ("No idea.", None),
        # More digits than int() takes.
        ("1" * 9000, "1" * 31),
    ],
)
def test_a_marked_number_is_the_result_or_the_last(answer: str, number: str | None) -> None:
    assert find_number(answer) == (None if number is None else Fraction(number))


def test_questions_are_read_as_they_are_published(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "Why?", "answer": "6 x 7\n#### 1,042"}) + "\n\n")
    [question] = read(file)
    assert question.text.startswith("Why?\n\nThink step by step") and question.known == 1042


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"q": "?", "answer": "#### 1"}',
        '{"question": "?", "answer": 4}',
        '{"question": "?", "answer": "4"}',
    ],
)
def test_other_files_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match="line 1: not a question and an answer that ends"):
        read(file)


def test_ways_are_compared_with_the_large_model() -> None:
    questions = [Question(number, "", Fraction(number)) for number in range(4)]
    texts = {"large": ["0", "1", "5", None], "tree": ["0", "1", "2", "4"]}
    large, tree = summarise(questions, texts)
    assert (large.accuracy, large.gain, large.failed) == (0.5, 0.0, 1)
    assert (tree.accuracy, tree.gain, tree.failed) == (0.75, 0.25, 0)
    assert tree.gain_error == pytest.approx(0.25) and tree.error == pytest.approx(0.25)
    assert summarise(questions, {"tree": texts["tree"]})[0].gain is None
