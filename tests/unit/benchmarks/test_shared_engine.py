"""Rows of ``bench shared-engine``, and how its rounds are summarised."""

from __future__ import annotations

import argparse

import pytest
from flashmoa_bench.linking.shared_engine import DEFAULT_ROWS, ChainRun, Chains, summarise


def test_rows_are_read_and_written_alike() -> None:
    assert Chains.read("8:1200/150:2000/60") == Chains(8, (1200, 2000), (150, 60))
    assert [str(Chains.read(row)) for row in DEFAULT_ROWS] == list(DEFAULT_ROWS)


@pytest.mark.parametrize("row", ["8", "8:1/2", "a:1/2:3/4", "0:9/2:9/2", "1:9/5:4/2", "1:9/2:9/0"])
def test_a_row_that_cannot_be_played_is_refused(row: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=row):
        Chains.read(row)


def test_latencies_are_compared_with_the_better_stock_engine() -> None:
    chains = Chains.read("2:9/2:9/2")

    def rounds(*seconds: float) -> list[list[ChainRun]]:
        return [[ChainRun(each - 1, 0.5, 7), ChainRun(each + 1, 0.7, 9)] for each in seconds]

    played = {
        "stock": rounds(4, 5, 9),
        "stock mixed": rounds(4, 4, 4),
        "known": rounds(4, 4, 4),
        "linked": rounds(2, 3, 4),
    }
    rows = summarise(chains, played)
    assert [(row.way, row.seconds, row.of_stock) for row in rows] == [
        ("stock", 5, 1.25), ("stock mixed", 4, 1), ("known", 4, 1), ("linked", 3, 0.75),
    ]  # fmt: skip
    assert all(row.gap == pytest.approx(0.6) and row.late == 8 for row in rows)
