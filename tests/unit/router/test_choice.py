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
        queued=st.integers(0, 3),
        is_popular=st.booleans(),
        takes_sibling=st.booleans(),
    ),
    max_size=6,
)


@given(candidates=CANDIDATES)
def test_without_patience_the_choice_is_the_papers(candidates: list[EngineCandidate]) -> None:
    chosen = choose_engine(candidates, patience=0)
    free = [one for one in candidates if not one.saturated]
    if not free:
        assert chosen is None
        return
    assert chosen in free
    best = min((-one.matched, one.load, one.running) for one in free)
    assert (-chosen.matched, chosen.load, chosen.running) == best


@given(candidates=CANDIDATES, patience=st.sampled_from([1, 8]))
def test_choice_weighs_delay_against_the_work_that_a_match_saves(
    candidates: list[EngineCandidate], patience: int
) -> None:
    chosen = choose_engine(candidates, patience)
    longest = max((one.matched for one in candidates), default=0)
    if any(one.is_popular for one in candidates if one.matched == longest):
        patience = 1
    prices = {one.engine: one.load + one.queued + patience * one.cost for one in candidates}
    free = [one for one in candidates if not one.saturated]
    best = min((prices[one.engine] for one in free), default=None)
    if chosen is not None:
        assert not chosen.saturated or chosen.takes_sibling
        assert best is None or prices[chosen.engine] <= best
    elif free:
        # A saturated engine with a longer match is cheaper than all that are free.
        least = max(one.matched for one in free if prices[one.engine] == best)
        assert any(
            one.saturated and one.matched > least and prices[one.engine] < (best or 0)
            for one in candidates
        )
