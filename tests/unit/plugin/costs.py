"""Draws costs of an engine's steps for property tests."""

from __future__ import annotations

from flashmoa_sglang.costs import Costs
from hypothesis import strategies as st


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    point = st.tuples(st.integers(1, 5000), st.floats(1e-4, 2.0))
    points = draw(st.lists(point, min_size=2, max_size=6, unique_by=lambda one: one[0]))
    mixed: list[tuple[int, int, float]] = []
    for decodes in draw(st.sets(st.sampled_from([1, 8, 32]))):
        seconds = sorted(draw(st.lists(st.floats(1e-4, 2.0), min_size=3, max_size=3)))
        mixed += [(decodes, *one) for one in zip((0, 16, 256), seconds, strict=True)]
    return Costs(tuple(points), min(seconds for _, seconds in points), tuple(mixed))
