"""Test the choice of an engine for one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.choice import EngineCandidate, choose_engine

CANDIDATES = st.lists(
    st.builds(
        EngineCandidate,
        engine=st.uuids().map(str),
        matched=st.integers(0, 3),
        cost=st.integers(0, 4),
        load=st.integers(0, 3),
        saturated=st.booleans(),
        running=st.integers(0, 2),
        takes_sibling=st.booleans(),
    ),
    max_size=6,
)


@given(candidates=CANDIDATES, patience=st.sampled_from([0, 1, 8]))
def test_choice_is_the_best_unsaturated_engine_unless_waiting_pays(
    candidates: list[EngineCandidate], patience: int
) -> None:
    chosen = choose_engine(candidates, patience)
    free = [one for one in candidates if not one.saturated]
    if not free:
        takes = [one for one in candidates if one.takes_sibling and patience]
        assert (chosen is None) == (not takes) and (chosen is None or chosen in takes)
        return
    longest = [one for one in free if one.matched == max(other.matched for other in free)]
    best = min(longest, key=lambda one: (one.load, one.running))
    worth_waiting = [
        one
        for one in candidates
        if one.saturated
        and one.matched > best.matched
        and patience * (best.cost - one.cost) > one.load - best.load
    ]
    if patience and worth_waiting:
        most = max(one.matched for one in worth_waiting)
        nearest = min((one.load, one.running) for one in worth_waiting if one.matched == most)
        first = [
            one
            for one in worth_waiting
            if one.matched == most and (one.load, one.running) == nearest
        ]
        assert any(one.takes_sibling == (chosen is not None) for one in first)
        assert chosen is None or chosen in first
    else:
        assert chosen is not None
        assert (chosen.matched, chosen.load, chosen.running) == (
            best.matched, best.load, best.running
        )  # fmt: skip
