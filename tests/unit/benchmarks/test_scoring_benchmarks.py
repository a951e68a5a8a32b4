"""Test the figures of the benchmarks of scoring, and how they read texts and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from flashmoa_bench.prefill import accuracy, lists
from flashmoa_bench.prefill.accuracy import LABELS, Outcome, find_label
from flashmoa_bench.prefill.lists import EMBEDDING, OURS, STOCK, ListAnswer


@pytest.mark.parametrize(
    ("answer", "labels", "expected"),
    [
        ("Positive.", LABELS, 0),
        ("It is negative, not positive.", LABELS, 1),
        ("positively", LABELS, None),
        ("B. negative", ("A", "B"), 1),
        ("It is a B", ("A", "B"), 1),
        ("", LABELS, None),
    ],
)
def test_first_label_of_an_answer_is_found(
    answer: str, labels: tuple[str, str], expected: int | None
) -> None:
    assert find_label(answer, labels) == expected


def test_only_clear_snippets_are_read(tmp_path: Path) -> None:
    file = tmp_path / "snippets.txt"
    file.write_text("1\t1.0\tgood\n2\t-0.9\tso so\n\n3\t-2\tbad\tvery\n")
    found = [(one.text, one.positive) for one in accuracy.read(file)]
    assert found == [("good", True), ("bad\tvery", False)]
    file.write_text("no tabs")
    with pytest.raises(ValueError, match="line 1: not an id"):
        accuracy.read(file)


def test_an_answer_without_a_label_is_wrong() -> None:
    outcomes = [Outcome(0, 0, 0, 0.5), Outcome(0, 0, None, 0.5), Outcome(1, 0, 1, 0.5)]
    row = accuracy.summarise("words", outcomes)
    assert (row.scored, row.decoded) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (row.unread, row.same, row.mass) == (pytest.approx(1 / 3), 0.5, 0.5)


def test_lists_are_compared_with_the_best_stock() -> None:
    stock = [ListAnswer(2.0, 2.0, [[0.5]], None), ListAnswer(4.0, 4.0, [[0.1]], None)]
    fast = [ListAnswer(1.5, 1.5, [[0.5]], None)] * 2
    ours = [ListAnswer(1.0, 0.5, [[0.5]], 10), ListAnswer(1.0, 0.7, [[0.3]], 12)]
    embedded = [ListAnswer(1.5, 1.5, None, 10)] * 2
    answers = {STOCK: stock, OURS: ours, EMBEDDING: embedded}
    _, row, other = lists.summarise(6, answers, 0.8)
    assert (row.seconds, row.gain, row.items_per_second) == (1.0, 3.0, 6.0)
    assert (row.computed, row.first, row.bound) == (11, 0.6, 0.8)
    assert row.difference == pytest.approx(0.2)
    assert other.difference is None
    rows = lists.summarise(6, answers | {"stock_512": fast}, 0.8)
    assert [row.gain for row in rows] == [0.5, 1.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(10, 1.0), (15, 1.5), (20, 2.0), (60, 8.0), (5, 0.5)]
)
def test_a_forwards_time_is_interpolated(tokens: int, seconds: float) -> None:
    points = [(10, 1.0), (20, 2.0), (30, 3.5)]
    assert lists.forward_seconds(points, tokens) == pytest.approx(seconds)
    assert lists.forward_seconds(points[:1], tokens) is None
