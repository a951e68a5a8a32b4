"""Test that long strings are compared, and searched for texts, in few steps."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.linking.learned_prompts import predict
from flashmoa.linking.learned_strings import (
    TextFinder,
    common_first_words,
    common_last_words,
    common_prefix,
    common_suffix,
)

tails = st.text("ab\u4e2d", max_size=4)
lengths = st.integers(0, 400)
phrases = st.lists(st.sampled_from(["plan", "Rome", "a", "-", "."]), max_size=6).map(" ".join)
texts = st.text("a1 .", max_size=9) | phrases


class CountedString(str):
    """Counts how often a text is looked for in it, and how often a part of it is taken."""

    searches = 0
    slices = 0

    def __contains__(self, text: object) -> bool:
        self.searches += 1
        return super().__contains__(text)  # type: ignore[operator]

    def __getitem__(self, key: object) -> str:
        self.slices += 1
        return super().__getitem__(key)  # type: ignore[index]


@given(lengths, tails, tails)
def test_common_beginnings_and_ends_are_as_long_as_they_are(
    length: int, tail: str, other_tail: str
) -> None:
    common = "a" * length
    one, other = common + tail, common + other_tail
    expected = len(os.path.commonprefix([one, other]))  # noqa: RUF071
    assert common_prefix(one, other) == expected
    assert common_suffix(one[::-1], other[::-1]) == expected


@pytest.mark.parametrize("end", ["", "b", "b" * 1000])
def test_long_strings_are_compared_in_few_steps(end: str) -> None:
    one, other = CountedString("a" * 1_000_000 + end), "a" * 1_000_000
    assert common_prefix(one, other) == 1_000_000
    assert common_suffix(CountedString(one[::-1]), other) == 1_000_000
    assert one.slices < 50


@given(texts, texts, texts, texts)
def test_common_words_are_cut_off_nowhere(one: str, common: str, two: str, other: str) -> None:
    for string, another in [(common + one, common + two), (one + common + two, common + other)]:
        end = common_prefix(string, another)
        while splits_word(string, end) or splits_word(another, end):
            end -= 1
        assert common_first_words(string, another) == end
        assert common_last_words(string, another) == common_first_words(string[::-1], another[::-1])


def test_the_beginning_of_a_long_word_is_found_in_few_steps() -> None:
    one, other = CountedString("-" + "a" * 1_000_000 + "b"), "-" + "a" * 1_000_001
    assert common_first_words(one, other) == 1
    assert common_last_words(CountedString(one[::-1]), other[::-1]) == 1
    assert one.slices < 100


def splits_word(string: str, at: int) -> bool:
    return 0 < at < len(string) and string[at - 1].isalnum() and string[at].isalnum()


def replace_one_after_the_other(string: str, known: dict[str, str]) -> str:
    """Do what :func:`predict` does, by trying each text at each place."""
    if string in known:
        return known[string]
    pieces = [string]
    for part in sorted(
        (text for text in known if len(text) >= 4), key=lambda each: (-len(each), each)
    ):
        for index in range(len(pieces) - 1, -1, -1):
            piece, start = pieces[index], 0
            if index % 2:
                continue
            new: list[str] = []
            at = 0
            while at <= len(piece) - len(part):
                end = at + len(part)
                is_whole = not splits_word(piece, at) and not splits_word(piece, end)
                if piece[at:end] == part and is_whole:
                    new += [piece[start:at], known[part]]
                    at = start = end
                else:
                    at += 1
            pieces[index : index + 1] = [*new, piece[start:]]
    return "".join(pieces)


@given(st.lists(texts, max_size=4).map(" ".join), st.lists(texts.filter(bool), max_size=8))
def test_what_is_found_is_what_trying_each_text_finds(string: str, parts: list[str]) -> None:
    known = {text: f"<{index}>" for index, text in enumerate(parts)}
    expected = replace_one_after_the_other(string, known)
    others = [f"text {number}" for number in range(100)]
    assert predict(string, known.get, TextFinder(known)) == expected
    assert predict(string, known.get, TextFinder([*others, *known])) == expected
    # It makes no difference when a text became known.
    finder = TextFinder(parts[4:])
    finder.within(string)
    finder.add([*others, *parts[:4]])
    assert predict(string, known.get, finder) == expected


@pytest.mark.parametrize("cut", range(990, 1010))
def test_a_long_text_is_found_wherever_its_words_end(cut: int) -> None:
    text = "-" * (cut - 10) + "0123456789" * 3
    others = [f"text {number}" for number in range(100)]
    assert TextFinder([*others, text]).within(f"It is {text}.") == [text]


def test_a_string_is_not_searched_for_a_text_again() -> None:
    string = CountedString("A plan for Rome")
    finder = TextFinder(["A plan", "Nepal"])
    assert finder.within(string) == ["A plan"]
    finder.add(["A plan", "Rome"])
    assert finder.within(string) == finder.within(string) == ["A plan", "Rome"]
    assert string.searches == 3


def test_a_string_is_not_searched_for_texts_whose_words_it_lacks() -> None:
    string = CountedString("A plan for Rome")
    finder = TextFinder([f"A plan for agent{number}" for number in range(1000)])
    finder.add(["plan for Rome"])
    assert finder.within(string) == ["plan for Rome"]
    assert string.searches == 1
