"""How the ways of ``flashmoa bench moa`` differ."""

from __future__ import annotations

from typing import cast

from flashmoa_bench.moa.ways import leaving

from flashmoa.moa import EarlyExit, Embedder

POLICY = EarlyExit(cast("Embedder", None), rule="threshold", threshold=0, min_answers=3)


def test_algorithm_1_is_measured_as_published_whatever_the_command_line_says() -> None:
    published = leaving("as published", POLICY, "Q")
    assert published is not None and published.diagonal
    assert (published.rule, published.min_answers, published.tau) == ("sample", 1, 0.7)
    full = leaving("full", POLICY, "Q")
    assert full is not None and not full.diagonal
    assert (full.rule, full.min_answers, full.threshold) == ("threshold", 3, 0)
    assert leaving("tree + overlap", POLICY, "Q") is None


def test_each_question_draws_its_own_random_number() -> None:
    first, other, again = (leaving("full", POLICY, text) for text in ("Q1", "Q2", "Q1"))
    assert first is not None and other is not None
    assert first == again and first.seed != other.seed
