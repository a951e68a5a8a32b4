"""Test the hashes of a prompt's blocks against the prompt's prefixes."""

from __future__ import annotations

from hypothesis import given

from flashmoa.router.blocks import text_blocks, token_blocks
from tests.unit.router.support import PROMPTS, SIZE, blocks, prefixes


@given(one=PROMPTS, other=PROMPTS)
def test_hashes_are_equal_exactly_up_to_the_shared_prefix(one: list[int], other: list[int]) -> None:
    shared = len(prefixes(one) & prefixes(other))
    pairs = zip(blocks(one).hashes, blocks(other).hashes, strict=False)
    assert [a == b for a, b in pairs].count(True) == shared
    assert blocks(one).hashes[:shared] == blocks(other).hashes[:shared]
    assert len(blocks(one).hashes) == len(one) // SIZE


def test_salted_and_text_prompts_share_no_hashes_with_plain_tokens() -> None:
    tokens = list(range(8))
    assert not set(token_blocks(tokens, SIZE, "a").hashes) & set(blocks(tokens).hashes)
    text = text_blocks("x" * 130)
    assert (len(text.hashes), text.length) == (2, 33)
    assert text_blocks("x" * 130 + "\ud800").hashes == text.hashes


def test_last_token_is_always_computed() -> None:
    assert blocks([1] * 8).cached_tokens(2) == 7
    assert blocks([1] * 9).cached_tokens(2) == 8
    assert blocks([]).cached_tokens(0) == 0
