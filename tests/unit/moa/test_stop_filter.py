"""A text that is written in pieces ends where a search in the whole text ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa.agent import StopFilter


@given(
    st.text("ab.", max_size=20),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_stop_text_that_is_complete_first(text: str, stops: list[str]) -> None:
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        complete = text[: ends[0]]
        expected = complete[: min(complete.index(stop) for stop in stops if stop in complete)]
    stopping = StopFilter(stops)
    kept = ""
    for letter in text:
        kept += stopping.add(letter)
        assert text.startswith(kept)
    assert kept + stopping.end() == expected and stopping.found == bool(ends)


def test_only_text_that_may_be_a_stop_text_is_held_back() -> None:
    stopping = StopFilter(["END", ""])
    assert stopping.add("the E") == "the " and stopping.held == "E"
    assert stopping.add("N") == "" and stopping.add("d") == "ENd"
    assert stopping.add(" END of") == " " and stopping.found
    assert stopping.add("it") == stopping.end() == ""
