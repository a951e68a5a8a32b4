"""Which engine an agent gets, and how much it writes."""

from __future__ import annotations

from flashmoa_bench.plan.planning import answer_lengths, place

ADDRESSES = {"a": ("one", "m"), "b": ("one", "m"), "c": ("two", "m"), "d": ("one", "n")}


def test_agents_get_engines_by_address_or_in_turn() -> None:
    assert place(ADDRESSES, 3) == {"a": 0, "b": 0, "c": 1, "d": 2}
    assert place(ADDRESSES, 2) == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert place(ADDRESSES, 5) == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_lengths_by_name_come_first_then_for_all() -> None:
    configured = {"a": 400, "b": None}
    assert answer_lengths(configured, {None: 30, "a": 7}) == {"a": 7, "b": 30}
    assert answer_lengths(configured, {"b": 9}) == {"a": 400, "b": 9}
