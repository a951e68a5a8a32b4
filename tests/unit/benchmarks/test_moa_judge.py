"""Test how ``flashmoa bench moa-judge`` reads questions and verdicts, and its figures."""

import json
from pathlib import Path

import pytest
from flashmoa_bench.moa.judging import (
    Pair,
    find_verdict,
    make_pairs,
    read_prompts,
    score,
    summarise,
)


def test_questions_of_three_published_forms_are_read(tmp_path: Path) -> None:
    rows = [
        {"uid": "1", "category": "hard_prompt", "prompt": "One?"},
        {"question_id": "2", "cluster": "x", "turns": [{"content": "Two?"}]},
        {"instruction": "Three?", "output": "", "generator": "x"},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(file) == ["One?", "Two?", "Three?"]
    for text, problem in (('{"question": "?"}', "line 1: no question"), ("", "has no questions")):
        file.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_prompts(file)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("At first [[A>B]], but no: [[B>>A]]", "<<"),
        ("<think>[[A>>B]]</think>[[A=B]].", "="),
        ("[[B<A]]", ">"),
        ("[[A<<B]]", "<<"),
        ("[[A>A]]", None),
        ("A is better.", None),
    ],
)
def test_the_last_verdict_counts(text: str, verdict: str | None) -> None:
    assert find_verdict(text) == verdict


def test_both_orders_count_and_a_clear_verdict_counts_three_times() -> None:
    pairs = make_pairs(["Why?"], ["<think>Hm.</think>ours"], [None])
    assert pairs == [Pair("Why?", "ours", ""), Pair("Why?", "", "ours")]
    # The way is A first, and then B.
    assert score(["[[A>>B]]", "[[A>B]]"]) == [[1.0, 1.0, 1.0, 0.0]]
    assert score(["[[A=B]]", "[[B>>A]]"]) == [[0.5, 1.0, 1.0, 1.0]]
    assert score(["[[A>B]]", "no verdict", "[[A<B]]", "[[A>>B]]"]) == [[0.0, 0.0, 0.0, 0.0]]


def test_a_rate_has_an_interval_that_shrinks_with_more_questions() -> None:
    few = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    answers = {"few": ["a", None, "b"], "many": ["a"] * 300}
    one, other = summarise({"few": few, "many": few * 100, "none": []}, answers, 0)
    assert one.rate == other.rate == 0.5 and (one.judged, one.failed) == (3, 1)
    assert one.low < other.low < 0.5 < other.high < one.high
    # With 300 questions, the standard error is 0.024; 90 % lie within 1.645 standard errors.
    assert other.high - other.low == pytest.approx(2 * 1.645 * 0.0236, rel=0.15)
    [sure] = summarise({"sure": [[1.0]] * 5}, {"sure": ["a"] * 5}, 0)
    assert sure.low == sure.rate == sure.high == 1.0
