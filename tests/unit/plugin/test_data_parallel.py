"""Test which data-parallel rank computes a stream."""

from __future__ import annotations

from array import array

from flashmoa_sglang.http.streams import choose_rank
from hypothesis import given
from hypothesis import strategies as st

GUIDE = "You plan journeys. " * 20


def test_siblings_share_a_rank() -> None:
    streams = [(0, "Something else entirely, and of some length, so that it could be a sibling.")]
    streams += [(2, GUIDE + "a")]
    assert choose_rank(3, streams, GUIDE + "b") == 2


def test_the_longest_common_prefix_decides() -> None:
    streams = [(0, GUIDE + "aaa"), (1, GUIDE + "aab"), (2, GUIDE)]
    assert choose_rank(3, streams, GUIDE + "aabc") == 1


def test_a_new_beginning_goes_to_the_rank_with_fewest_streams() -> None:
    assert choose_rank(3, [], GUIDE) == 0
    assert choose_rank(3, [(0, "a"), (1, "b")], GUIDE) == 2
    assert choose_rank(2, [(0, "You plan"), (1, "x"), (1, "y")], GUIDE) == 0


def test_a_rank_far_above_the_others_gets_no_more_siblings() -> None:
    assert choose_rank(2, [(0, GUIDE)] * 15, GUIDE) == 0
    assert choose_rank(2, [(0, GUIDE)] * 16, GUIDE) == 1


def test_tokens_are_compared_with_tokens_and_text_with_text() -> None:
    ids = array("q", range(100))
    assert choose_rank(2, [(0, GUIDE), (1, ids)], [*range(90), 7]) == 1
    assert choose_rank(2, [(0, array("q", range(9000))), (1, ids)], list(range(9000))) == 0
    assert choose_rank(2, [(0, GUIDE), (0, ids)], GUIDE[:80]) == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=200)), max_size=20),
    st.text("ab", max_size=200),
)
def test_the_choice_is_always_one_of_the_ranks(
    streams: list[tuple[int, str]], beginning: str
) -> None:
    assert choose_rank(4, streams, beginning) in range(4)
