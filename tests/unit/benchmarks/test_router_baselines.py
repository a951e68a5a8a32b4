"""Test the routing policies that ours is compared with."""

from __future__ import annotations

from flashmoa.router.policies import CacheAware, EngineTraits, Random, RoundRobin
from tests.unit.router.support import blocks, place


def test_round_robin_takes_turns_and_counts_requests() -> None:
    turn, dice = RoundRobin(), Random(1)
    assert place(turn, "0", blocks([])) is None
    for engine in ("a", "b", "c"):
        turn.join(engine, EngineTraits())
        dice.join(engine, EngineTraits())
    assert [place(turn, str(n), blocks([])) for n in range(4)] == ["a", "b", "c", "a"]
    assert {place(dice, str(n), blocks([])) for n in range(30)} == {"a", "b", "c"}
    turn.leave("a")
    turn.end("1")
    assert turn.running == {"b": 0, "c": 1}


def test_cache_aware_follows_a_long_prefix_unless_requests_are_uneven() -> None:
    stock = CacheAware(seed=0)
    stock.join("a", EngineTraits())
    stock.join("b", EngineTraits())
    shared, other = [1] * 40, [2] * 40
    first = place(stock, "0", blocks([*shared, 5]))
    # First the same prefix, then a prompt with less than 0.3 known: the engine with fewer requests.
    assert place(stock, "1", blocks([*shared, 6])) == first
    assert place(stock, "2", blocks([*shared[:8], *other])) != first
    for number in range(3, 70):
        place(stock, str(number), blocks([*shared, 5]))
    # The engine has 64 requests more than the other one, and more than 1.5 times its number.
    assert stock.running[first or ""] == 66
    assert place(stock, "70", blocks([*shared, 5])) != first
