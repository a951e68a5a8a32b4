"""``Costs``: what prefills, decode steps and both in one step take, from measured points."""

import pytest
from flashmoa_sglang.costs import UNMEASURED, Costs
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    """Draw costs, measured in any order. Steps with more tokens take longer."""
    point = st.tuples(st.integers(1, 5000), st.floats(1e-4, 2.0))
    points = draw(st.lists(point, min_size=2, max_size=6, unique_by=lambda one: one[0]))
    mixed: list[tuple[int, int, float]] = []
    for decodes in draw(st.sets(st.sampled_from([1, 8, 32]))):
        seconds = sorted(draw(st.lists(st.floats(1e-4, 2.0), min_size=3, max_size=3)))
        mixed += [(decodes, *one) for one in zip((0, 16, 256), seconds, strict=True)]
    least = min(seconds for _, seconds in points)
    return Costs(tuple(points), least, tuple(draw(st.permutations(mixed))))


@given(
    any_costs(), st.integers(1, 10000), st.integers(1, 2000), st.integers(1, 40), st.floats(0, 5)
)
def test_costs_increase_and_can_be_inverted(
    costs: Costs, tokens: int, more: int, decodes: int, seconds: float
) -> None:
    assert costs.prefill(tokens + 1) >= costs.prefill(tokens) - 1e-9
    added = [costs.added(decodes, some) for some in (0, tokens, tokens + more)]
    assert 0 <= added[0] <= added[1] + 1e-9 <= added[2] + 2e-9
    most = costs.tokens_within(seconds)
    if 0 < most < 1 << 20:
        assert costs.prefill(most) <= seconds + 1e-9
    if most < 1 << 19:
        assert costs.prefill(most + 1) > seconds - 1e-9


def test_costs_need_two_sizes() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        Costs(((5, 0.1), (5, 0.2)), 0.1)


def test_a_size_may_be_measured_repeatedly() -> None:
    mixed = ((8, 0, 0.02), (8, 16, 0.03), (8, 16, 0.04))
    costs = Costs(((1, 0.01), (1, 0.02), (512, 0.1)), 0.01, (*mixed, *mixed))
    assert costs.prefill(1) == 0.01
    assert 0 <= costs.prefill(0) <= 0.01
    assert costs.added(8, 16) == pytest.approx(0.02)


def test_the_most_efficient_forward_need_not_be_the_largest() -> None:
    assert Costs(((1, 0.1), (256, 0.64), (512, 1.5)), 0.1).per_token_at_best == 0.64 / 256


def test_prefills_are_interpolated() -> None:
    costs = Costs(((101, 0.3), (1, 0.1), (301, 0.5)), 0.01)
    assert costs.prefill(51) == pytest.approx(0.2)
    assert costs.prefill(201) == pytest.approx(0.4)
    assert costs.prefill(501) == pytest.approx(0.7)


def test_a_disturbed_prefill_makes_none_dearer() -> None:
    """Nothing would ride then, so that no further times would tell otherwise."""
    costs = Costs(((1, 0.01), (4, 0.4), (64, 0.03), (128, 0.06)), 0.01)
    assert costs.prefill(4) == pytest.approx(0.03)
    assert costs.prefill(64) == pytest.approx(0.03)
    assert costs.added(1, 64) < 0.03


@given(costs=any_costs(), more=st.integers(0, 3000))
def test_measured_steps_take_the_measured_time(costs: Costs, more: int) -> None:
    alone = {decodes: seconds for decodes, tokens, seconds in costs.mixed if not tokens}
    for decodes, tokens, seconds in costs.mixed:
        assert costs.decode(decodes) == pytest.approx(alone[decodes])
        assert costs.added(decodes, tokens) == pytest.approx(seconds - alone[decodes], abs=1e-9)
        if tokens == 256:
            prefill = costs.prefill(256 + more + decodes) - costs.prefill(256 + decodes)
            added = costs.added(decodes, 256 + more)
            assert added == pytest.approx(costs.added(decodes, 256) + prefill, abs=1e-9)


def test_steps_are_interpolated() -> None:
    mixed = ((1, 0, 0.01), (1, 64, 0.02), (9, 0, 0.03), (9, 64, 0.06))
    costs = Costs(((1, 0.01), (1001, 0.11)), 0.5, mixed)
    assert costs.decode(5) == pytest.approx(0.02)
    assert costs.added(1, 32) == pytest.approx(0.005)
    # The measured step with a single request replaces ``decode_step``.
    assert costs.decode(1) == pytest.approx(0.01)
    assert costs.decode_weight == pytest.approx(100)


def test_small_prefills_bound_a_decodes_weight() -> None:
    """Prompts that are held would be overdue after one step, by the engine's work."""
    assert Costs(((1, 0.006), (200, 0.006)), 0.006).decode_weight == pytest.approx(800)


def test_the_total_of_tokens_decides() -> None:
    # The 129th token takes the time of all 128 tokens before it.
    mixed = ((1, 0, 0.01), (1, 127, 0.02), (1, 128, 0.03), (8, 0, 0.01), (8, 120, 0.018))
    costs = Costs(((1, 0.01), (1001, 0.11)), 0.01, mixed)
    for decodes in range(1, 8):
        assert costs.added(decodes, 128 - decodes) == pytest.approx(0.01)
        assert costs.added(decodes, 129 - decodes) == pytest.approx(0.02)
    for decodes in range(8, 100):
        assert costs.added(decodes, 128 - decodes) == pytest.approx(0.008)
        assert costs.added(decodes, 0) == 0


def test_unmeasured_steps_follow_from_prefills() -> None:
    costs = Costs(((1, 0.01), (1001, 0.11)), decode_step=0.02)
    assert costs.decode(1) == 0.02
    assert costs.decode(11) == pytest.approx(0.021)
    assert costs.added(1, 500) == pytest.approx(0.06 - 0.02)
    # Decoding may take longer than so small a prefill.
    assert costs.added(1, 10) == 0
    assert UNMEASURED.added(4, 1024) > 0


def test_a_lone_measured_step_counts() -> None:
    costs = Costs(((1, 0.01), (1001, 0.11)), 0.02, ((8, 0, 0.05),))
    assert costs.decode(8) == pytest.approx(0.05)
    assert costs.added(8, 1000) == pytest.approx(costs.prefill(1008) - 0.05)
