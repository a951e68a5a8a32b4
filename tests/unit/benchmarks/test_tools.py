"""The workloads of ``bench tools``, and how their rounds are summarised."""

from __future__ import annotations

from argparse import Namespace

import pytest
from flashmoa_bench.linking.tools import WORKLOADS, AfterTools, summarise, workloads

ARGUMENTS = Namespace(
    agents=16,
    prompt=4000,
    answer=60,
    calls=4,
    result=100,
    long_result=2000,
    seconds=[1.0, 5.0],
)


def test_only_under_pressure_the_agents_exceed_a_pool_for_half_of_them() -> None:
    loads = workloads(ARGUMENTS)
    assert tuple(loads) == WORKLOADS
    pool = 16 * loads["pressure"].context / 2
    assert loads["pressure"].context == 4000 + 4 * 160 + 60
    tokens = {name: load.agents * load.context for name, load in loads.items()}
    assert [name for name in WORKLOADS if tokens[name] > pool] == ["pressure"]


def test_times_are_compared_with_stock_sglangs() -> None:
    def played(*rounds: list[float], late: int) -> list[list[AfterTools]]:
        return [[AfterTools(seconds, 100, late) for seconds in each] for each in rounds]

    stock = played([1, 2, 9], [4, 4, 4], [3, 3, 3], late=90)
    linked = played([1, 1, 1], [1, 1, 3], [2, 2, 2], late=10)
    rows = summarise("pressure", {"stock": stock, "linked": linked}, computed=0.9, bound=0.1)
    assert [(row.way, row.median, row.of_stock, row.p90) for row in rows] == [
        ("stock", 3, 1, 4),
        ("linked", 1, pytest.approx(1 / 3), 2),
    ]
    assert [(row.kept, row.late) for row in rows] == [(0, 90), (1, 10)]
    assert all((row.computed, row.bound) == (0.9, 0.1) for row in rows)
