"""Which engine an agent gets, and how much it writes."""

from __future__ import annotations

from flashmoa_bench.plan.planning import answer_lengths, place

ADDRESSES = {"a": ("one", "m"), "b": ("one", "m"), "c": ("two", "m"), "d": ("one", "n")}


def test_each_address_is_an_engine_or_agents_are_spread_over_another_number() -> None:
    assert place(ADDRESSES, 3) == {"a": 0, "b": 0, "c": 1, "d": 2}
    assert place(ADDRESSES, 2) == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert place(ADDRESSES, 5) == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_a_length_by_name_comes_before_one_for_all_and_that_before_the_clients() -> None:
    configured = {"a": 400, "b": None}
    assert answer_lengths(configured, {None: 30, "a": 7}) == {"a": 7, "b": 30}
    assert answer_lengths(configured, {"b": 9}) == {"a": 400, "b": 9}
