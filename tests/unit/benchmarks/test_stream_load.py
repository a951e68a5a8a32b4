"""What growing streams cost a scheduler and an HTTP process, by increment and by length."""

from __future__ import annotations

import pytest
from flashmoa_bench.linking.stream_costs import (
    StreamLoad,
    Way,
    compare,
    describe,
    increment_ms,
    summarise,
)

# Both of 200 and of 28,000 tokens.
AT_REST = StreamLoad(0.3, 4.0, 200.0, 0.0, 1.0)
# Each of 100 steps takes 3 ms longer, for 50 increments.
SHORT = StreamLoad(0.5, 7.0, 100.0, 50.0, 1.0)


def test_an_increment_costs_what_steps_take_longer_than_with_streams_at_rest() -> None:
    assert increment_ms(SHORT, AT_REST) == pytest.approx(6.0)
    assert increment_ms(AT_REST, AT_REST) is None


def rounds(*long: StreamLoad) -> dict[str, list[StreamLoad]]:
    """Return rounds in which short streams cost the same, and the long ones this."""
    return {
        str(Way()): [AT_REST] * len(long),
        str(Way(200)): [AT_REST] * len(long),
        str(Way(200, grows=True)): [SHORT] * len(long),
        str(Way(28000)): [AT_REST] * len(long),
        str(Way(28000, grows=True)): [*long],
    }


def test_streams_of_two_lengths_are_compared_round_by_round() -> None:
    dearer = StreamLoad(0.6, 10.0, 100.0, 50.0, 1.0)
    ratios = compare(rounds(SHORT, dearer), [200, 28000])
    assert ratios["scheduler"] == pytest.approx([1.0, 2.0])
    assert ratios["HTTP"] == pytest.approx([1.0, 1.5])
    assert compare(rounds(SHORT), [28000]) == {}


def test_a_round_without_a_measurable_cost_is_not_compared() -> None:
    ratios = compare(rounds(AT_REST, SHORT), [200, 28000])
    assert ratios == {"scheduler": pytest.approx([1.0]), "HTTP": pytest.approx([1.0])}
    assert "too little to be measured" in describe("HTTP", [], [200, 28000])


def test_ratios_are_described_with_their_spread() -> None:
    text = describe("HTTP", [1.0, 1.1, 1.2, 1.3, 1.4], [200, 28000])
    assert "28000 tokens against 200: 1.20 times" in text and "between 1.10 and 1.30" in text


def test_each_figure_is_the_median_of_its_rounds() -> None:
    assert summarise([AT_REST, AT_REST, SHORT]) == AT_REST
