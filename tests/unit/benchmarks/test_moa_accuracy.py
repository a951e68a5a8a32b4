"""Test the figures of ``flashmoa bench moa-accuracy``."""

from __future__ import annotations

import pytest
from flashmoa_bench.moa.accuracy import summarise
from flashmoa_bench.moa.question_sets import Question


def test_ways_are_compared_with_the_large_model() -> None:
    questions = [Question(number, "", f"{number}".__eq__) for number in range(4)]
    texts = {"large": ["0", "1", "5", None], "tree": ["0", "1", "2", "4"]}
    large, tree = summarise(questions, texts)
    assert (large.accuracy, large.gain, large.failed) == (0.5, 0.0, 1)
    assert (tree.accuracy, tree.gain, tree.failed) == (0.75, 0.25, 0)
    assert tree.gain_error == pytest.approx(0.25) and tree.error == pytest.approx(0.25)
    assert summarise(questions, {"tree": texts["tree"]})[0].gain is None
