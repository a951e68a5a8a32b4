"""Test the rule of another router that ours is compared with."""

from __future__ import annotations

from flashmoa_bench.routing.rivals import Dynamo
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.policies import EngineTraits
from tests.unit.router.support import PROMPTS, SIZE, blocks, place, prefixes


def test_dynamo_weighs_what_is_cached_against_what_is_booked() -> None:
    router = Dynamo(seed=0)
    assert place(router, "early", blocks([1])) is None
    for engine in "ab":
        router.join(engine, EngineTraits())
    long = blocks([1] * 40)
    router.add_blocks("a", long.hashes)
    # It occupies ten blocks, and prefills none at one engine, and ten at the other.
    assert place(router, "0", long) == "a"
    # Ten other blocks: 10 prefilled and 20 occupied at the first, 10 and 10 at the second.
    assert place(router, "1", blocks([2] * 40)) == "b"
    router.end("1")
    router.remove_blocks("a", long.hashes)
    # Blocks in use are no cached ones: ten are prefilled and occupied at either.
    assert {place(router, f"more {n}", long) for n in range(9)} == {"a", "b"}
    router.leave("a")
    assert place(router, "last", long) == "b"


@given(prompts=st.lists(PROMPTS, max_size=12), engines=st.integers(1, 3), data=st.data())
def test_dynamo_takes_an_engine_of_least_cost(
    prompts: list[list[int]], engines: int, data: st.DataObject
) -> None:
    """Compare with the formula over sets of prefixes."""
    router = Dynamo(seed=1)
    names = [f"e{number}" for number in range(engines)]
    cached: dict[str, set[tuple[int, ...]]] = {name: set() for name in names}
    booked: dict[str, dict[str, tuple[list[int], int]]] = {name: {} for name in names}
    for name in names:
        router.join(name, EngineTraits())
    for number, prompt in enumerate(prompts):
        own = prefixes(prompt)

        def cost(name: str, prompt: list[int] = prompt, own: set[tuple[int, ...]] = own) -> float:
            waiting = sum(tokens for _, tokens in booked[name].values())
            used = set[tuple[int, ...]]().union(*(prefixes(p) for p, _ in booked[name].values()))
            prefill = (waiting + len(prompt)) / SIZE - len(own & cached[name])
            return max(0.0, prefill) + len(used | own)

        chosen = place(router, str(number), blocks(prompt))
        assert chosen is not None
        assert cost(chosen) == min(map(cost, names))
        left = max(0, len(prompt) - SIZE * len(own & cached[chosen]))
        booked[chosen][str(number)] = (prompt, left)
        if booked[chosen] and data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(sorted(booked[chosen])))
            router.finish_prefill(ended)
            done, _ = booked[chosen].pop(ended)
            router.add_blocks(chosen, blocks(done).hashes)
            router.end(ended)
            cached[chosen] |= prefixes(done)
