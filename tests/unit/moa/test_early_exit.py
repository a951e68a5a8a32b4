"""Test Faster-MoA's Algorithm 1 against the formulas as printed."""

import math
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa.early_exit import (
    EarlyExit,
    ScoredAnswers,
    compute_quality,
    confidence,
)
from tests.unit.moa.embedders import Embedder

confidences = st.lists(st.floats(0.01, 1), min_size=1, max_size=9)


@given(confidences, st.integers(0, 1000), st.floats(0.1, 1))
def test_score_equals_the_papers_formula(found: list[float], seed: int, tau: float) -> None:
    dice, count = random.Random(seed), len(found)
    similar = [[dice.random() for _ in range(count)] for _ in range(count)]
    for i in range(count):
        similar[i][i] = 1.0
    pairs = {(i, j): found[i] * found[j] for i in range(count) for j in range(i + 1)}
    p = sum(pairs[i, j] * similar[i][j] for i, j in pairs) / sum(pairs.values())
    b = min(1, max(0, 1 - abs(p - tau) / tau))
    c = math.sqrt(sum(value**2 for value in found) / count)
    quality = compute_quality(found, similar, tau=tau, diagonal=True)
    assert quality.agreement == pytest.approx(p)
    assert quality.score == pytest.approx(math.sqrt(c * b))


def test_one_answer_scores_with_the_diagonal() -> None:
    alone = compute_quality([0.8], [[1.0]], tau=0.7, diagonal=True)
    assert alone.agreement == 1 and alone.score == pytest.approx(math.sqrt(0.8 * (1 - 0.3 / 0.7)))
    assert compute_quality([0.8], [[1.0]], tau=0.7, diagonal=False).score == 0
    assert compute_quality([0.0, 0.0], [[1.0, 1.0]] * 2, tau=0.7, diagonal=False).score == 0


def test_confidence_is_the_geometric_mean() -> None:
    assert confidence([math.log(0.5), math.log(0.125)]) == pytest.approx(0.25)
    assert confidence([]) == 0


@pytest.mark.parametrize("rows", [None, [[1.0, 0.5]] * 3 + [[1.0]], [["a", "b"]] * 2])
async def test_an_embedder_of_another_form_decides_nothing(rows: Any) -> None:
    embedder: Any = SimpleNamespace(compare=AsyncMock(return_value=rows))
    answers = ScoredAnswers(EarlyExit(embedder), random.Random(0), 4)
    assert [await answers.add_and_decide("1.1", text, [0.0]) for text in "abc"] == [False] * 3
    assert embedder.compare.await_count == 1


@pytest.mark.parametrize("rule", ["sample", "threshold"])
async def test_exit_when_answers_are_confident_and_agree(rule: str) -> None:
    policy = EarlyExit(Embedder(), tau=1.0, rule=rule, threshold=0.9)  # type: ignore[arg-type]

    async def run(texts: list[str], logprob: float) -> list[bool]:
        answers = ScoredAnswers(policy, random.Random(policy.seed), len(texts) + 1)
        return [await answers.add_and_decide("1.1", text, [logprob]) for text in texts]

    # Confident answers that are all alike suffice as soon as two are complete.
    assert await run(["aa", "bb", "cc"], 0.0) == [False, True, True]
    # Answers without any confidence never suffice.
    assert await run(["aa", "bb", "cc"], -30.0) == [False, False, False]


@pytest.mark.parametrize("wrong", [{"tau": 0}, {"threshold": 2}, {"min_answers": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}\n.*input_value={value}"):
        EarlyExit(Embedder(), **wrong)


def test_as_published_leaves_with_one_answer() -> None:
    published = EarlyExit.as_published(Embedder())
    assert published.diagonal and published.min_answers == 1
