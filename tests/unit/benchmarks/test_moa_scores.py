"""Test the figures of ``flashmoa bench moa`` and their tables."""

from __future__ import annotations

from io import StringIO

import pytest
from flashmoa_bench.moa.prompt_tokens import PromptTokens
from flashmoa_bench.moa.scores import ScoredAnswer, gains, summarise, verdict
from flashmoa_bench.moa.tables import show, show_gains
from flashmoa_bench.moa.ways import MixtureOutcome, MixtureWay
from rich.console import Console


def make_answer(number: int, group: str, score: float, seconds: float | None) -> ScoredAnswer:
    if seconds is None:
        return ScoredAnswer(f"{number}", group, score, None)
    outcome = MixtureOutcome(
        "text",
        seconds,
        seconds / 2,
        tokens=10,
        prompts={"1.1": PromptTokens(50, 0, None, None), "2.1": PromptTokens(100, number, 60, 20)},
        asked={"small": 3, "large": 3},
        used={"small": 3, "large": 1},
        decisions=[0.1, 0.3],
        deciding=0.5,
    )
    return ScoredAnswer(f"{number}", group, score, outcome)


TIMED: dict[MixtureWay, list[ScoredAnswer]] = {
    "all-to-all": [make_answer(1, "easy", 1, 4.0), make_answer(2, "hard", 0, 10.0)],
    "full": [make_answer(1, "easy", 1, 1.0), make_answer(2, "hard", 1, 5.0)],
}


def test_latencies_are_compared_question_by_question() -> None:
    base, full = summarise(TIMED, TIMED, "all-to-all", "one layer")
    assert base.relative == {"easy": 1, "hard": 1, "all": 1}
    assert full.relative == {"easy": 0.25, "hard": 0.5, "all": 0.375}
    assert full.seconds == {"easy": 1, "hard": 5, "all": 3}
    assert full.first_token == 1.5 and full.relative_first is None


def test_scores_are_means_of_groups_and_of_all() -> None:
    scored: dict[MixtureWay, list[ScoredAnswer]] = {
        "all-to-all": [make_answer(n, "easy", n % 2, 1.0) for n in range(4)],
        "full": [make_answer(0, "easy", 1, 1.0), make_answer(1, "hard", 0, None)],
    }
    base, full = summarise(TIMED, scored, "all-to-all", "one layer")
    assert base.accuracy == {"easy": 0.5, "all": 0.5}
    assert base.error == pytest.approx((1 / 3) ** 0.5 / 2)
    assert full.accuracy == {"easy": 1, "hard": 0, "all": 0.5}
    assert full.failed == 1


def test_early_exit_reports_unused_proposers_and_decision_time() -> None:
    full = summarise(TIMED, TIMED, "all-to-all", "one layer")[1]
    assert full.used["small"] == {"easy": 1, "hard": 1, "all": 1}
    assert full.used["large"]["all"] == pytest.approx(1 / 3)
    # The delay is half a second of one second, and of five seconds.
    assert full.deciding_on_path == pytest.approx((0.5 + 0.1) / 2)
    assert full.decision == pytest.approx(0.2)


def test_prompt_tokens_are_averaged_by_agent_and_unknown_ones_printed_as_such() -> None:
    full = summarise(TIMED, None, "all-to-all", "one layer")[1]
    assert full.prompts == {
        "1.1": PromptTokens(50, 0, None, None),
        "2.1": PromptTokens(100, 1.5, 60, 20),
    }
    printed = StringIO()
    show([full], Console(width=140, file=printed))
    shown = [line.split() for line in printed.getvalue().splitlines()]
    assert ["full", "1", "1", "50", "0", "?", "?"] in shown
    assert ["2", "1", "100", "2", "60", "20"] in shown


@pytest.mark.parametrize(("mixed", "told"), [(0, "not more"), (1, "more")])
def test_verdict_compares_mixtures_with_the_best_model_alone(mixed: float, told: str) -> None:
    scored: dict[MixtureWay, list[ScoredAnswer]] = {
        "small": [make_answer(1, "easy", 0, 1.0)],
        "large": [make_answer(1, "easy", 0.5, 1.0)],
        "tree": [make_answer(1, "easy", 0, 1.0)],
        "full": [make_answer(1, "easy", mixed, 1.0)],
    }
    said = verdict(summarise(scored, scored, "tree", "tree"))
    assert said is not None and f"is {told} accurate than large alone (50.0%)" in said
    assert verdict(summarise(TIMED, TIMED, "full", "full")) is None


def test_used_shares_are_those_of_timed_questions_if_none_are_scored() -> None:
    full = summarise(TIMED, None, "all-to-all", "one layer")[1]
    assert not full.accuracy and full.used == summarise(TIMED, TIMED, "full", "full")[1].used


def test_gains_are_compared_question_by_question_with_their_own_error() -> None:
    scored: dict[MixtureWay, list[ScoredAnswer]] = {
        "large": [make_answer(n, "easy", 0.5, 1.0) for n in range(4)],
        "tree": [make_answer(n, "easy", 0.75, 1.0) for n in range(4)],
        "full": [make_answer(n, "easy", n % 2, 1.0) for n in range(4)],
    }
    tree, full = gains(scored, "large")
    assert (tree.difference, tree.error, tree.is_certain) == (0.25, 0, True)
    assert full.difference == 0 and full.error == pytest.approx((1 / 3) ** 0.5 / 2)
    assert not full.is_certain
    assert gains({"tree": scored["tree"]}, "large") == []
    printed = StringIO()
    show_gains([tree, full], "large", Console(width=140, file=printed))
    assert "tree: +25.0 points over large alone, standard error 0.0: more" in printed.getvalue()
    assert "full: +0.0 points over large alone, standard error 28.9: not" in printed.getvalue()
