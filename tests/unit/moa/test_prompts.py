"""Test aggregators' prompts, and the shares of answers in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.moa.prompts import AggregationPrompt, fair_shares

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 1 + 1?"},
]


def test_answers_first_puts_answers_into_the_system_message() -> None:
    prompt = AggregationPrompt(instruction="Weigh:", heading=" [{number}] ")
    slots = [f"{prompt.title(number)}{text}" for number, text in ((1, "two"), (2, "{three}"))]
    first, *rest = prompt.messages(TALK, slots)
    assert first == {"role": "system", "content": "Be brief.\n\nWeigh: [1] two [2] {three}"}
    assert rest == TALK[1:]
    assert prompt.messages("Why?", [])[1] == {"role": "user", "content": "Why?"}


def test_question_first_puts_answers_at_the_end() -> None:
    prompt = AggregationPrompt("question-first", "Weigh:", "\n[{number}]", "\nNow you:")
    system, *talk = prompt.messages(TALK, [prompt.title(1), "two"])
    assert system["content"] == "Be brief.\n\nWeigh:"
    assert talk[:-1] == TALK[1:-1]
    assert talk[-1]["content"] == "What is 1 + 1?\n[1]two\nNow you:"


@pytest.mark.parametrize("question", [[], [{"role": "assistant", "content": "Hello!"}], TALK[:1]])
def test_question_must_end_with_a_user_message(question: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="last message"):
        AggregationPrompt().messages(question, [])


@given(st.lists(st.integers(0, 50), max_size=9), st.integers(-5, 300))
def test_fair_shares_cut_only_the_longest_to_one_length(lengths: list[int], room: int) -> None:
    shares = fair_shares(lengths, room)
    assert sum(shares) <= max(0, room)
    assert all(0 <= share <= length for share, length in zip(shares, lengths, strict=True))
    cut = [share for share, length in zip(shares, lengths, strict=True) if share < length]
    if cut:
        # All cut answers are equally long, except for the remainder of the division.
        assert max(shares) - min(cut) <= 1 and sum(shares) == max(0, room)
