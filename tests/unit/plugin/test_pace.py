"""``Pace``: when clients are asked to append next."""

from __future__ import annotations

import heapq
from itertools import pairwise

import pytest
from flashmoa_sglang.http.streams import Pace
from hypothesis import given
from hypothesis import strategies as st


@given(moments=st.lists(st.floats(0, 5), max_size=50), streams=st.integers(0, 300))
def test_appends_are_neither_immediate_nor_too_far_apart(
    moments: list[float], streams: int
) -> None:
    pace, slower = Pace(), Pace(slowdown=4)
    for now in sorted(moments):
        seconds = pace.next(now, streams)
        assert 0.04 - 1e-9 <= seconds <= 2 * max(0.04, 0.005 * streams) + 1e-9
        assert slower.next(4 * now, streams) == pytest.approx(4 * seconds)


@pytest.mark.parametrize(
    ("streams", "around"),
    [(1, 0.04), (5, 0.04), (8, 0.04), (30, 0.15), (50, 0.25), (100, 0.5), (256, 1.28)],
)
def test_streams_that_begin_together_are_soon_spread(streams: int, around: float) -> None:
    pace = Pace()
    turns = [0.0] * streams
    seen: list[float] = []
    while len(seen) < 20 * streams:
        now = heapq.heappop(turns)
        seen.append(now)
        heapq.heappush(turns, now + pace.next(now, streams))
    late = seen[5 * streams :]
    gaps = [after - before for before, after in pairwise(late)]
    assert gaps == pytest.approx([around / streams] * len(gaps), rel=0.01)
