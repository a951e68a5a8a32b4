"""Filters of an answer find in its pieces what a search in the whole text finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa.answer_filters import RepeatFilter, StopFilter

# Few words, some with the same beginning.
WORDS = st.lists(st.sampled_from(["a", "ab", "b", "c", "cab", "d."]), max_size=9)
SPACE = st.sampled_from([" ", "\n", "  "])


@st.composite
def texts(draw: st.DrawFn) -> str:
    words = draw(WORDS)
    text = "".join(draw(SPACE) + word for word in words)
    return text[draw(st.integers(0, 2)) :] + draw(st.sampled_from(["", "", " ", "\n\n"]))


def search(written: str, part: str) -> tuple[str, str]:
    """Return the kept and the dropped text of a whole part."""
    before, after = written.split(), part.split()
    cut = not written[-1:].isspace()
    for count in range(min(len(before), len(after)), 0, -1):
        tail = before[-count:]
        ends = after[count - 1].startswith(tail[-1]) if cut else after[count - 1] == tail[-1]
        if len(set(tail)) >= 3 and after[: count - 1] == tail[:-1] and ends:
            place = 0
            for word in after[: count - 1]:
                place = part.index(word, place) + len(word)
            place = part.index(tail[-1], place) + len(tail[-1])
            rest = part[place:]
            return (rest if cut else rest.lstrip()), part[:place]
    return part, ""


def filter_pieces(written: str, pieces: list[str]) -> tuple[str, RepeatFilter]:
    repeats = RepeatFilter(written)
    return "".join(repeats.add(piece) for piece in pieces) + repeats.end(), repeats


@given(texts(), texts(), st.booleans(), st.data())
def test_filter_equals_a_search_in_the_whole_text(
    written: str, part: str, again: bool, data: st.DataObject
) -> None:
    if again and written.split():
        # Drawn texts rarely have a repetition by chance.
        begin = data.draw(st.integers(0, len(written) - 1))
        part = written[begin:] + part
    cuts = sorted(data.draw(st.sets(st.integers(0, len(part)), max_size=6)))
    pieces = [part[a:b] for a, b in zip([0, *cuts], [*cuts, len(part)], strict=True)]
    text, repeats = filter_pieces(written, pieces)
    assert (text, repeats.dropped) == search(written, part)
    assert repeats.held == ""


@pytest.mark.parametrize(
    ("written", "part", "expected"),
    [
        ("You need three days in", "three days in Kathmandu", " Kathmandu"),
        ("three days in Kath", "three days in Kathmandu", "mandu"),
        ("One needs two days.\n", "One needs two days. Or more.", "Or more."),
        ("One needs two days. ", "One needs two days.\n\nOr more.", "Or more."),
        ("You need three days in", " Nepal", " Nepal"),
        ("0, 0, 0, 0,", " 0, 0, 0, 1", " 0, 0, 0, 1"),
        ("in three days", "in three da", "in three da"),
        ("", "You need", "You need"),
    ],
)
def test_repetition_is_dropped(written: str, part: str, expected: str) -> None:
    assert filter_pieces(written, list(part))[0] == expected


def test_only_text_that_may_be_a_repetition_is_held_back() -> None:
    repeats = RepeatFilter("You need three days in Kathmandu")
    assert repeats.add("thr") == "" and repeats.held == "thr"
    assert repeats.add("ough") == "through"
    assert repeats.add(" three days in Kathmandu") == " three days in Kathmandu"
    assert RepeatFilter("two words").add("two") == "two"


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
