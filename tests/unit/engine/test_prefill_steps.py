"""Test the rule that decides when a prefill pays on a server without the plugin."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import plain


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_text(costs: plain.StepCosts, length: int, expected: int | None) -> list[int]:
    """Write a text token by token; return after how many tokens steps were sent."""
    sent, steps = 0, list[int]()
    for written in range(1, length + 1):
        if costs.pays(written - sent, plain.tokens_to_come(written, expected)):
            steps.append(written)
            sent = written
    return steps


def make_costs(*steps: tuple[int, int | None, float, int]) -> tuple[plain.StepCosts, Clock]:
    """Return the costs of a server that has taken these steps, and their clock."""
    clock = Clock()
    costs = plain.StepCosts(clock)
    for tokens, cached, seconds, before in steps:
        costs.add(tokens, cached, seconds, before=before)
    return costs, clock


def measured(overhead: float, per_token: float = 0.001) -> plain.StepCosts:
    """Return the costs of a server with this overhead, in seconds."""
    sizes = (1_000_000, 100, 200)
    return make_costs(*((n, 0, overhead + n * per_token, 0) for n in sizes))[0]


@given(length=st.integers(1, 3000), overhead=st.sampled_from([0.0, 0.01, 0.2, 3.0]))
def test_expected_lengths_take_few_steps(length: int, overhead: float) -> None:
    costs = measured(overhead)
    steps = run_text(costs, length, length)
    assert len(steps) <= max(0.0, math.log2(length / costs.least_tokens)) + 1
    # The remaining tokens would not have paid either.
    assert length - (steps[-1] if steps else 0) < 2 * costs.least_tokens


@given(length=st.integers(1, 3000), expected=st.none() | st.integers(1, 3000))
def test_wrong_expectations_take_few_steps(length: int, expected: int | None) -> None:
    costs, _ = make_costs()
    steps = run_text(costs, length, expected)
    sizes = [b - a for a, b in pairwise([0, *steps])]
    assert all(size >= plain.MIN_STEP_TOKENS for size in sizes)
    assert len(steps) <= math.log2(3000) + math.log(max(length, 2), 1.5)
    if expected is None:
        # Each step leaves at most a third of the text to later steps.
        left = length - (steps[-1] if steps else 0)
        assert left < max(plain.MIN_STEP_TOKENS, length / 3) + 1


@pytest.mark.parametrize(("overhead", "least"), [(0.0, 64), (0.05, 64), (0.2, 200), (3.0, 3000)])
def test_a_step_is_worth_its_overhead(overhead: float, least: int) -> None:
    assert measured(overhead).least_tokens == pytest.approx(least, rel=0.01)


def test_one_slow_step_does_not_count_as_overhead() -> None:
    costs = measured(0.1)
    costs.add(100, 0, 30.0, before=0)
    assert costs.least_tokens == pytest.approx(100, rel=0.01)


def test_measurements_expire() -> None:
    costs, clock = make_costs((1000, 0, 1.0, 0), *[(10, 0, 10.0, 0)] * 3)
    assert not costs.pays(1000, 0)
    clock.now = 61.0
    assert costs.pays(plain.MIN_STEP_TOKENS, 0)


def test_no_cache_report_means_larger_steps() -> None:
    costs, _ = make_costs()
    assert costs.add(1000, None, 0.1, before=500)
    assert not costs.pays(plain.MIN_UNMEASURED_STEP_TOKENS - 1, 0)
    assert costs.pays(plain.MIN_UNMEASURED_STEP_TOKENS, 0)
    # It is measured from its first report on.
    costs.add(100, 0, 0.1, before=0)
    assert costs.pays(plain.MIN_STEP_TOKENS, 0)


@pytest.mark.parametrize(("cached", "is_found"), [(0, False), (499, False), (500, True)])
def test_nothing_pays_after_a_lost_prompt(cached: int, is_found: bool) -> None:
    costs, clock = make_costs()
    assert costs.add(2000, cached, 0.1, before=1000) == is_found
    for clock.now, pays in (59.0, is_found), (61.0, True):
        assert costs.pays(100_000, 0) == pays


def test_a_step_fills_at_least_a_cache_block() -> None:
    costs, clock = make_costs()
    # Blocks of 128 tokens: of 1,010 tokens, seven blocks were kept.
    assert costs.add(1200, 7 * 128, 0.1, before=1010)
    for clock.now, least in (0.0, 1010 - 7 * 128), (61.0, plain.MIN_STEP_TOKENS):
        assert costs.least_tokens == least


def test_fully_cached_steps_are_not_measured() -> None:
    assert make_costs((1000, 1000, 5.0, 0))[0].least_tokens == plain.MIN_STEP_TOKENS
