"""Test that messages of an earlier run become messages of this run, in few steps."""

import os
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashmoa.link import learned_texts
from flashmoa.link.learned_texts import (
    Divergence,
    KnownTexts,
    TextFinder,
    common_first_words,
    common_last_words,
    common_prefix,
    end_at,
    find_changes,
    find_divergence,
    similarity,
)

words = st.text("ab ", max_size=12)
tails = st.text("ab\u4e2d", max_size=4)
lengths = st.integers(0, 400)
phrases = st.lists(st.sampled_from(["plan", "Rome", "a", "-", "."]), max_size=6).map(" ".join)
texts = st.text("a1 .", max_size=9) | phrases


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def predict(value: Any, known: Mapping[str, str]) -> Any:
    return learned_texts.predict(value, known.get, TextFinder(known))


def test_known_texts_are_replaced_in_messages() -> None:
    earlier = [{"role": "user", "content": [{"type": "text", "text": "Check:\nA long plan.\nOK?"}]}]
    content = predict(earlier, {"A long plan.": "Another."})[0]["content"]
    assert content == [{"type": "text", "text": "Check:\nAnother.\nOK?"}]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"a": ["call_8"], "b": ["call_9"]}, "look:0"),
        ({"a": ["look:0"], "b": ["walk:0"]}, "look:0"),
        ({"a": ["call_8"], "b": ["call_8"]}, "call_8"),
        ({"a": ["call_8"], "b": []}, "call_8"),
    ],
)
def test_an_ambiguous_id_is_not_replaced(now: dict[str, list[str]], expected: str) -> None:
    known = KnownTexts({}, {"a": ["look:0"], "b": ["look:0"]})
    assert known.predict("look:0", {}.get, now.__getitem__) == expected


def test_unknown_texts_are_not_replaced() -> None:
    finder, known = TextFinder(["Rome", "a plan for Rome"]), {"Rome": "Oslo"}
    assert learned_texts.predict("a plan for Rome", known.get, finder) == "a plan for Oslo"


@pytest.mark.parametrize(
    ("actual", "divergence"),
    [
        ([user("Hello"), user("It is 12:07.")], Divergence(1, 10)),
        ([user("Hello"), user("It is 12:01.")], None),
        ([user("Hello"), user("It is 12:01."), user("More")], Divergence(2, 0)),
        ([user("Hello")], Divergence(1, 0)),
        ([{"role": "system", "content": "Hello"}], Divergence(0, 0)),
    ],
)
def test_divergence_is_where_contents_differ_first(
    actual: list[dict[str, str]], divergence: Divergence | None
) -> None:
    assert find_divergence([user("Hello"), user("It is 12:01.")], actual) == divergence


@given(st.lists(words.map(user)), st.lists(words.map(user)))
def test_messages_are_certain_until_they_diverge(
    predicted: list[dict[str, str]], actual: list[dict[str, str]]
) -> None:
    divergence = find_divergence(predicted, actual)
    if divergence is None:
        assert predicted == actual
        return
    ended = end_at(predicted, divergence, "|")
    assert len(ended) == divergence.message + 1
    assert ended[:-1] == actual[: divergence.message]
    certain = ended[-1]["content"].removesuffix("|")
    if certain:
        assert actual[divergence.message]["content"].startswith(certain)


def test_changes_are_differing_strings_and_words() -> None:
    earlier = [user("Plan three days in Nepal, please."), user("Be short.")]
    actual = [user("Plan three days in Norway, please."), user("Be short.")]
    assert find_changes(earlier, earlier, actual) == {
        "Plan three days in Nepal, please.": "Plan three days in Norway, please.",
        "Nepal": "Norway",
    }


def test_a_right_prediction_is_no_change() -> None:
    earlier, predicted = [user("Nepal: a plan")], [user("Nepal: another")]
    assert find_changes(earlier, predicted, predicted) == {}


@given(words, words)
def test_changes_correct_predictions(before: str, now: str) -> None:
    changes = find_changes(before, before, now)
    if before and before != now:
        assert predict(before, changes) == now


@pytest.mark.parametrize(
    ("likest", "less_like"),
    [
        ([user("Be kind."), user("Rome")], [user("Be strict."), user("Rome")]),
        ([user("Be kind."), user("To Rome")], [user("Be kind."), user("In Rome")]),
        ([user("Be kind."), user("To Rome")], [user("Be kind.")]),
        ([user("Be kind."), user("To Rome")], [user("Be kind."), user("To Rome"), user("Go")]),
        ([user("Be kind."), user("By car")], [user("Be kind."), {"role": "tool", "content": "To"}]),
        ([user("Be kind."), {"role": "user", "content": []}], [user("Be kind.")]),
    ],
)
def test_the_likest_messages_are_alike_longest(likest: Any, less_like: Any) -> None:
    messages = [user("Be kind."), user("To Rome")]
    assert similarity(likest, messages) > similarity(less_like, messages)


def test_common_letters_make_no_messages_alike() -> None:
    blue, black, red = ([user(f"Translate: {color}")] for color in ("blue", "black", "red"))
    assert similarity(black, blue) == similarity(red, blue)


class CountedString(str):
    """Counts its searches for texts and its slices."""

    searches = 0
    slices = 0

    def __contains__(self, text: object) -> bool:
        self.searches += 1
        return super().__contains__(text)  # type: ignore[operator]

    def __getitem__(self, key: object) -> str:
        self.slices += 1
        return super().__getitem__(key)  # type: ignore[index]


@given(lengths, tails, tails)
def test_common_beginnings_have_full_length(length: int, tail: str, other_tail: str) -> None:
    common = "a" * length
    one, other = common + tail, common + other_tail
    expected = len(os.path.commonprefix([one, other]))  # noqa: RUF071
    assert common_prefix(one, other) == expected


@pytest.mark.parametrize("end", ["", "b", "b" * 1000])
def test_long_strings_are_compared_in_few_steps(end: str) -> None:
    one, other = CountedString("a" * 1_000_000 + end), "a" * 1_000_000
    assert common_prefix(one, other) == 1_000_000
    assert one.slices < 50


@given(texts, texts, texts, texts)
def test_common_words_are_cut_off_nowhere(one: str, common: str, two: str, other: str) -> None:
    for string, another in [(common + one, common + two), (one + common + two, common + other)]:
        end = common_prefix(string, another)
        while splits_word(string, end) or splits_word(another, end):
            end -= 1
        assert common_first_words(string, another) == end
        assert common_last_words(string, another) == common_first_words(string[::-1], another[::-1])


def test_a_long_words_beginning_is_found_soon() -> None:
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
    parts = [text for text in known if len(text) >= 4]
    for part in sorted(parts, key=lambda each: (-len(each), each)):
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
@example("1a a a plan", ["a a "])
def test_the_finder_finds_all_that_trying_finds(string: str, parts: list[str]) -> None:
    known = {text: f"<{index}>" for index, text in enumerate(parts)}
    expected = replace_one_after_the_other(string, known)
    others = [f"text {number}" for number in range(100)]
    assert learned_texts.predict(string, known.get, TextFinder(known)) == expected
    assert learned_texts.predict(string, known.get, TextFinder([*others, *known])) == expected
    # It makes no difference when a text became known.
    finder = TextFinder(parts[4:])
    finder.within(string)
    finder.add([*others, *parts[:4]])
    assert learned_texts.predict(string, known.get, finder) == expected


@pytest.mark.parametrize("cut", range(990, 1010))
def test_a_long_text_is_found_at_any_cut(cut: int) -> None:
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


def test_a_search_needs_a_word_of_the_text() -> None:
    string = CountedString("A plan for Rome")
    finder = TextFinder([f"A plan for agent{number}" for number in range(1000)])
    finder.add(["plan for Rome"])
    assert finder.within(string) == ["plan for Rome"]
    assert string.searches == 1
