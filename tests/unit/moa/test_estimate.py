"""The estimate of a question's cost, against sums that are done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoa.moa.config import MixtureConfig
from flashmoa.moa.estimate import estimate

SPEED = {"prefill": 1000, "decode": 10}
SMALL: dict[str, Any] = {
    "engine": "http://a",
    "model": "small",
    "max_tokens": 100,
    "speed": SPEED,
    "price": {"input": 1, "output": 10},
}
LARGE: dict[str, Any] = {**SMALL, "model": "large", "speed": {"prefill": 500, "decode": 5}}


def config(*layers: list[dict[str, Any]], **more: Any) -> MixtureConfig:
    return MixtureConfig.model_validate({"layers": [{"models": layer} for layer in layers], **more})


def test_tree_counts_each_cluster_and_the_slowest_path() -> None:
    mixture = config([{**SMALL, "repeat": 3}, LARGE], [SMALL, SMALL], [SMALL])
    found = estimate(mixture, question_tokens=280)
    assert [agent.name for agent in found.agents[-2:]] == ["2.2", "3.1"]
    assert [agent.prompt_tokens for agent in found.agents] == [300] * 4 + [300 + 96 + 200] * 3
    assert found.completion_tokens == 700
    # The large proposer is in the path: its prefill and decode, and twice a small aggregator's.
    assert found.seconds == pytest.approx(300 / 500 + 100 / 5 + 2 * (596 / 1000 + 100 / 10))
    assert found.price == pytest.approx((found.prompt_tokens + 10 * 700) / 1e6)
    table = f"{found}".splitlines()
    assert len(table) == 9 and table[-1].split()[:2] == ["all", "2,988"]


def test_answers_have_the_given_length_without_max_tokens() -> None:
    model = {key: value for key, value in SMALL.items() if key != "max_tokens"}
    found = estimate(config([model, model], [SMALL]), answer_tokens=50)
    assert [agent.completion_tokens for agent in found.agents] == [50, 50, 50]


def test_unknown_speed_or_price_makes_the_sum_unknown() -> None:
    bare = {"engine": "http://a", "model": "bare"}
    found = estimate(config([SMALL, bare], [SMALL]))
    assert found.seconds is None and found.price is None and found.tokens > 0
    assert "?" in f"{found}"


def test_debate_reads_everyone_in_each_round() -> None:
    debate = config([{**SMALL, "repeat": 3}], kind="debate", debate={"rounds": 3, "ballot": r"\d+"})
    found = estimate(debate, question_tokens=280)
    assert [agent.name for agent in found.agents][-1] == "3.3"
    first, second, third = (found.agents[3 * n].prompt_tokens for n in range(3))
    # In the third round all answers of two rounds are read.
    assert second - first == 300 + 104 and third - second == 300


def test_staircase_reads_every_proposer() -> None:
    found = estimate(config([SMALL, SMALL], [LARGE], kind="staircase"), question_tokens=280)
    assert found.agents[-1].prompt_tokens == 300 + 96 + 200
