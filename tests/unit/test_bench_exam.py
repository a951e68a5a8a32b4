"""What answers to many questions come to."""

from __future__ import annotations

import pytest

from flashmoa.bench.exam import Answered, summarise
from flashmoa.bench.mixtures import Outcome, Way


def answered(number: int, group: str, score: float, seconds: float | None) -> Answered:
    if seconds is None:
        return Answered(f"{number}", group, score, None)
    asked, used = {"small": 3, "large": 3}, {"small": 3, "large": 1}
    outcome = Outcome(
        "text", seconds, seconds / 2, 10, 100, 60, 20, asked, used, [0.1, 0.1], [seconds]
    )
    return Answered(f"{number}", group, score, outcome)


TIMED: dict[Way, list[Answered]] = {
    "all-to-all": [answered(1, "easy", 1, 4.0), answered(2, "hard", 0, 10.0)],
    "full": [answered(1, "easy", 1, 1.0), answered(2, "hard", 1, 5.0)],
}


def test_latencies_are_compared_question_by_question() -> None:
    base, full = summarise(TIMED, TIMED, "all-to-all", "one layer")
    assert base.relative == {"easy": 1, "hard": 1, "all": 1}
    assert full.relative == {"easy": 0.25, "hard": 0.5, "all": 0.375}
    assert full.seconds == {"easy": 1, "hard": 5, "all": 3}
    assert full.first_token == 1.5 and full.relative_first is None


def test_scores_are_means_of_groups_and_of_all() -> None:
    scored: dict[Way, list[Answered]] = {
        "all-to-all": [answered(n, "easy", n % 2, 1.0) for n in range(4)],
        "full": [answered(0, "easy", 1, 1.0), answered(1, "hard", 0, None)],
    }
    base, full = summarise(TIMED, scored, "all-to-all", "one layer")
    assert base.accuracy == {"easy": 0.5, "all": 0.5}
    assert base.error == pytest.approx((1 / 3) ** 0.5 / 2)
    assert full.accuracy == {"easy": 1, "hard": 0, "all": 0.5}
    assert full.failed == 1


def test_agents_left_out_and_what_deciding_took() -> None:
    full = summarise(TIMED, TIMED, "all-to-all", "one layer")[1]
    assert full.used["small"] == {"easy": 1, "hard": 1, "all": 1}
    assert full.used["large"]["all"] == pytest.approx(1 / 3)
    assert full.deciding == pytest.approx(0.4 / 6)
    assert (full.prompt_tokens, full.computed, full.late) == (100, 60, 20)


def test_without_scores_those_that_were_timed_say_who_was_needed() -> None:
    full = summarise(TIMED, None, "all-to-all", "one layer")[1]
    assert not full.accuracy and full.used == summarise(TIMED, TIMED, "full", "full")[1].used
