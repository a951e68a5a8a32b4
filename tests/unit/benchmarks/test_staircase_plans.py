"""Test what staircases and debates take by cost tables alone."""

from __future__ import annotations

import pytest
from flashmoa_bench.moa.script import QuestionScript, ScriptOptions, write_script
from flashmoa_bench.moa.staircases import StaircaseWay, compute_staircase, plan_staircase
from flashmoa_bench.recorded import RecordedQuestion

QUESTION = RecordedQuestion(7, 30, {"small": [10], "medium": [20], "large": [40]}, {(0, 1): 1.0})


class Steps:
    """A second for each prefill, and for each step."""

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        return 1.0

    def decode(self, requests: int, context: int) -> float:
        return 1.0

    def mixed(self, prompts: tuple[tuple[int, int], ...], requests: int, context: int) -> float:
        return 1.0


TIMES = dict.fromkeys(("small", "medium", "large"), Steps())


def script_of(way: StaircaseWay) -> QuestionScript:
    return write_script(QUESTION, way.sizes, ScriptOptions())


def test_aggregator_writes_a_part_for_each_chunk_and_the_rest_after_the_last() -> None:
    way = StaircaseWay("mixture", 3, "rounds", 8)
    *proposers, parts = plan_staircase(way, script_of(way), "pd", 4.0)
    assert [[request.name for request in requests] for requests in proposers] == [
        ["1.1"], ["1.2"], ["1.3"]
    ]  # fmt: skip
    assert [part.name for part in parts] == ["2.1.1", "2.1.2", "2.1"]
    # Chunks of 8, 16 and 32 tokens, of which the last is longer than the longest answer's rest.
    assert [part.chunk for part in parts] == [8, 24, 56]
    assert [part.tokens for part in parts] == [8, 16, 16]
    assert [part.before for part in parts] == [0, 8, 24]
    # Tokens of eight characters fill chunks twice as fast.
    *_, parts = plan_staircase(way, script_of(way), "pd", 8.0)
    assert [part.chunk for part in parts] == [4, 12, 28]


@pytest.mark.parametrize("kind", ["mixture", "debate"])
def test_first_token_waits_for_chunks_and_not_for_answers(kind: str) -> None:
    whole = StaircaseWay(kind, 3)
    answers = {
        first: compute_staircase(way, script_of(way), TIMES, "pd", 4.0)
        for first, way in (
            (0, whole), *((first, StaircaseWay(kind, 3, "rounds", first)) for first in (4, 16))
        )
    }  # fmt: skip
    rounds = 1 if kind == "mixture" else 2
    # A prefill and 39 steps for each round of answers, then a prefill.
    assert answers[0].first_token == 40 * rounds + 1
    assert answers[0].seconds == answers[0].first_token + 39
    # A request whose prefill ends with a step joins the step after the next.
    assert 4 * rounds + 1 <= answers[4].first_token <= 5 * rounds < answers[16].first_token
    assert answers[4].seconds < answers[0].seconds
    assert {answer.tokens for answer in answers.values()} == {40}
    assert answers[0].rounds == 1 and answers[0].late == answers[0].prompt
    assert answers[4].late is not None and answers[4].late < answers[4].prompt
