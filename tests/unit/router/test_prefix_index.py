"""Test the index of all engines' blocks against a walk through each engine's prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.engine_state import BlockTable
from flashmoa.router.prefix_index import PrefixIndex
from tests.unit.router.support import PROMPTS, SIZE, blocks, prefixes


@given(
    cached=st.lists(st.lists(PROMPTS, max_size=4), min_size=1, max_size=5),
    left=st.sets(st.integers(0, 4)),
    prompt=PROMPTS,
)
def test_each_engine_matches_its_own_longest_prefix(
    cached: list[list[list[int]]], left: set[int], prompt: list[int]
) -> None:
    index = PrefixIndex()
    tables = [BlockTable(None, index) for _ in cached]
    for table, prompts in zip(tables, cached, strict=True):
        for one in prompts:
            table.promise(blocks(one).hashes)
            table.commit(blocks(one).hashes)
    for number in left & set(range(len(tables))):
        tables[number].withdraw()
    expected: dict[int, int] = {}
    for number, prompts in enumerate(cached):
        known = set().union(*map(prefixes, prompts)) if number not in left else set()
        found = max((len(one) // SIZE for one in known & prefixes(prompt)), default=0)
        if found:
            expected[tables[number].engine] = found
    assert index.match(blocks(prompt).hashes) == expected


def test_bits_of_engines_that_left_are_used_again() -> None:
    index = PrefixIndex()
    first, second = BlockTable(None, index), BlockTable(None, index)
    first.commit(blocks([1] * 8).hashes)
    first.withdraw()
    third = BlockTable(None, index)
    assert (first.engine, second.engine, third.engine) == (1, 2, 1)
    assert index.match(blocks([1] * 8).hashes) == {} and len(index) == 0
