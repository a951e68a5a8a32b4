"""Test that messages of an earlier run are turned into those of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.linking import learned_prompts
from flashmoa.linking.learned_prompts import (
    Divergence,
    end_at,
    find_changes,
    find_divergence,
    similarity,
)
from flashmoa.linking.learned_strings import TextFinder

words = st.text("ab ", max_size=12)
known_texts = st.dictionaries(words.filter(bool), words, max_size=4)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def predict(value: Any, known: Mapping[str, str]) -> Any:
    return learned_prompts.predict(value, known.get, TextFinder(known))


def test_known_texts_are_replaced_in_strings_of_messages() -> None:
    earlier = [{"role": "user", "content": [{"type": "text", "text": "Check:\nA long plan.\nOK?"}]}]
    content = predict(earlier, {"A long plan.": "Another."})[0]["content"]
    assert content == [{"type": "text", "text": "Check:\nAnother.\nOK?"}]


def test_a_short_text_is_replaced_only_where_it_is_a_whole_string() -> None:
    assert predict(["no", "say no"], {"no": "yes"}) == ["yes", "say no"]


def test_a_text_within_a_longer_word_is_not_replaced() -> None:
    assert predict("Rome, Romeo", {"Rome": "Oslo"}) == "Oslo, Romeo"


def test_the_longest_of_overlapping_texts_is_replaced() -> None:
    known = {"plan for Rome": "X", "Rome": "Oslo"}
    assert predict("plan for Rome, then Rome", known) == "X, then Oslo"


@given(words, known_texts)
def test_what_replaces_a_text_is_not_replaced_again(string: str, known: dict[str, str]) -> None:
    marked = {text: f"<{index}>" for index, text in enumerate(known)}
    replaced = predict(string, marked)
    for text, mark in marked.items():
        replaced = replaced.replace(mark, text)
    assert replaced == string


def test_a_text_in_what_replaces_another_is_not_replaced() -> None:
    known = {"plan for": "Rome, then", "Rome": "Oslo"}
    assert predict("plan for Rome", known) == "Rome, then Oslo"


@given(words)
def test_nothing_is_replaced_if_nothing_is_known(string: str) -> None:
    assert predict(string, {}) == string


def test_texts_of_which_nothing_is_known_are_not_replaced() -> None:
    finder = TextFinder(["Rome", "a plan for Rome"])
    assert learned_prompts.predict("a plan for Rome", {"Rome": "Oslo"}.get, finder) == (
        "a plan for Oslo"
    )


def test_divergence_is_where_the_contents_begin_to_differ() -> None:
    predicted = [user("Hello"), user("It is 12:01.")]
    assert find_divergence(predicted, [user("Hello"), user("It is 12:07.")]) == Divergence(1, 10)
    assert find_divergence(predicted, predicted) is None
    assert find_divergence(predicted, [*predicted, user("More")]) == Divergence(2, 0)
    assert find_divergence(predicted, predicted[:1]) == Divergence(1, 0)


def test_a_message_of_another_role_differs_from_its_first_character() -> None:
    assert find_divergence([user("Hello")], [{"role": "system", "content": "Hello"}]) == Divergence(
        0, 0
    )


@given(st.lists(words.map(user)), st.lists(words.map(user)))
def test_messages_are_certain_up_to_where_they_diverge(
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


def test_changes_are_the_strings_and_the_words_that_differ() -> None:
    earlier = [user("Plan three days in Nepal, please."), user("Be short.")]
    actual = [user("Plan three days in Norway, please."), user("Be short.")]
    assert find_changes(earlier, earlier, actual) == {
        "Plan three days in Nepal, please.": "Plan three days in Norway, please.",
        "Nepal": "Norway",
    }


def test_what_was_predicted_right_is_no_change_of_words() -> None:
    earlier, predicted = [user("Nepal: a plan")], [user("Nepal: another")]
    assert find_changes(earlier, predicted, predicted) == {}


@given(words, words)
def test_changes_turn_what_was_predicted_into_what_came(before: str, now: str) -> None:
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
def test_messages_are_the_liker_the_longer_they_are_alike(likest: Any, less_like: Any) -> None:
    messages = [user("Be kind."), user("To Rome")]
    assert similarity(likest, messages) > similarity(less_like, messages)


def test_letters_with_which_different_words_begin_do_not_make_messages_alike() -> None:
    asked = [user("Translate: blue")]
    assert similarity([user("Translate: black")], asked) == similarity(
        [user("Translate: red")], asked
    )
