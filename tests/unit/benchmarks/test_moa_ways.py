"""Test which early-exit policy each way of ``flashmoa bench moa`` has."""

from __future__ import annotations

from typing import cast

from flashmoa_bench.moa.ways import choose_early_exit

from flashmoa.moa import EarlyExit, Embedder

POLICY = EarlyExit(cast("Embedder", None), rule="threshold", threshold=0, min_answers=3)


def test_as_published_ignores_the_early_exit_options_of_the_command_line() -> None:
    published = choose_early_exit("as published", POLICY, "Q")
    assert published is not None and published.diagonal
    assert (published.rule, published.min_answers, published.tau) == ("sample", 1, 0.7)
    full = choose_early_exit("full", POLICY, "Q")
    assert full is not None and not full.diagonal
    assert (full.rule, full.min_answers, full.threshold) == ("threshold", 3, 0)
    assert choose_early_exit("tree + overlap", POLICY, "Q") is None


def test_each_question_draws_its_own_random_number() -> None:
    first, other, again = (choose_early_exit("full", POLICY, text) for text in ("Q1", "Q2", "Q1"))
    assert first is not None and other is not None
    assert first == again and first.seed != other.seed
