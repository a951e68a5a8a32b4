"""``Pace``: when clients are asked to append next."""

from __future__ import annotations

import heapq
from itertools import pairwise

import pytest
from flashmoa_sglang.http.trigger import Pace
from hypothesis import given
from hypothesis import strategies as st


@given(
    moments=st.lists(st.floats(0, 5), max_size=50),
    streams=st.integers(1, 300),
    busy=st.booleans(),
)
def test_appends_are_neither_immediate_nor_too_far_apart(
    moments: list[float], streams: int, busy: bool
) -> None:
    pace, slower = Pace(), Pace(slowdown=4)
    for now in sorted(moments):
        seconds = pace.next(now, streams, busy)
        assert 0.04 - 1e-9 <= seconds <= 0.25 + 1e-9
        assert slower.next(4 * now, streams, busy) == pytest.approx(4 * seconds)


@pytest.mark.parametrize(
    ("streams", "busy", "around"),
    [(1, False, 0.04), (4, False, 0.08), (8, False, 0.16), (8, True, 0.25)],
)
def test_streams_that_begin_together_are_soon_spread(
    streams: int, busy: bool, around: float
) -> None:
    pace = Pace()
    turns = [0.0] * streams
    seen: list[float] = []
    while len(seen) < 20 * streams:
        now = heapq.heappop(turns)
        seen.append(now)
        heapq.heappush(turns, now + pace.next(now, streams, busy))
    late = seen[5 * streams :]
    gaps = [after - before for before, after in pairwise(late)]
    assert gaps == pytest.approx([around / streams] * len(gaps), rel=0.01)
