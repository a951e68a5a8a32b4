"""Test the family's task, prompts and tokenizer; what the models can do is measured elsewhere."""

from __future__ import annotations

from itertools import islice

import pytest
from flashmoa_bench.family.prompts import AGGREGATION, add_titles, staircase_prompt
from flashmoa_bench.family.questions import (
    GRADES,
    Grade,
    ProgramLine,
    Question,
    final_answer,
    is_right,
    line_errors,
    questions,
)
from flashmoa_bench.family.training_data import examples

from flashmoa.moa.settings import Order

QUESTION = Question(47, (ProgramLine("+", 85), ProgramLine("*", 7), ProgramLine("-", 30)))


def test_a_question_has_its_text_solution_and_grade() -> None:
    told = "a = 47, b = a + 85, c = b * 07, d = c - 30. Find d modulo 100."
    assert QUESTION.text == told
    assert QUESTION.solution == "b = 32, c = 24, d = 94. Answer: 94"
    assert QUESTION.grade == "medium"


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("b = 02, c = 06. Answer: 06", "06"),
        ("Answer: 03. No: Answer: 90", "90"),
        ("b = 02, c = 06. Answer:", None),
        ("Answer: 6", None),
        ("Answer: 666", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_two_digits_given(text: str, final: str | None) -> None:
    assert final_answer(text) == final


def test_only_the_final_answer_counts() -> None:
    assert is_right(QUESTION, "b = 01. Answer: 94")
    assert not is_right(QUESTION, "b = 32, c = 24, d = 94. Answer: 84")


@pytest.mark.parametrize("grade", GRADES)
def test_questions_are_the_same_for_a_seed_and_of_their_grade(grade: Grade) -> None:
    once, again = (list(islice(questions(3, grade), 50)) for _ in range(2))
    assert once == again
    assert {question.grade for question in once} == {grade}


def test_no_question_for_training_is_held_out() -> None:
    learned = set(islice(questions(0), 3000))
    assert learned.isdisjoint(islice(questions(0, held_out=True), 300))


def test_a_mistake_in_one_line_changes_later_lines() -> None:
    values = QUESTION.values(lambda line, value: value + 1 if line == 0 else value)
    assert values == [33, 31, 1]


def test_an_aggregators_prompt_has_the_answers_before_or_after_the_question() -> None:
    before, after = (
        prompt.messages("Q", add_titles(prompt, ["one", "", "two"]))
        for prompt in AGGREGATION.values()
    )
    assert before[0]["content"].endswith(" wrong.\n1. one\n3. two")
    assert before[1]["content"] == "Q"
    assert after[1]["content"] == "Q\n1. one\n3. two"


@pytest.mark.parametrize(
    ("order", "asked"),
    [
        ("contiguous", ["Q\n1. abcdefghijkl\n2. ABCD"]),
        ("rounds", ["Q\n1. abcd\n2. ABCD\n1. efghijkl"]),
    ],
)
def test_a_staircase_prompt_has_its_chunks_in_the_given_order(
    order: Order, asked: list[str]
) -> None:
    prompt = AGGREGATION["question-first"]
    messages = staircase_prompt(order, prompt, "Q", ["abcdefghijklm", "ABCD"], [1, 2])
    assert [message["content"] for message in messages[1:]] == asked


def test_training_examples_are_the_same_for_a_seed() -> None:
    assert examples(5, 20, 0.5) == examples(5, 20, 0.5)


def test_the_tokenizer_spells_lines_in_few_tokens_and_keeps_any_text() -> None:
    from flashmoa_bench.family.tokenizer import family_tokenizer
    from flashmoa_sglang.http.token_boundaries import find_boundaries

    tokenizer = family_tokenizer(4096)
    assert tokenizer.tokenize("b = 02, c = ") == ["bĠ=Ġ", "0", "2", ",", "ĠcĠ=Ġ"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION.text}], tokenize=False, add_generation_prompt=True
    )
    assert len(tokenizer(prompt)["input_ids"]) < 40
    for text in (prompt, "Grüße, 中文 🙂\n\t x==1  y"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # A prompt stream can tokenise texts while they grow.
    assert "latin word" in find_boundaries(tokenizer, lambda text: tokenizer(text)["input_ids"]).kinds


def test_a_widened_network_computes_the_same_as_the_smaller_one() -> None:
    import torch
    from flashmoa_bench.family.net2net import widen
    from flashmoa_bench.family.network import Network, NetworkShape

    torch.manual_seed(0)
    small = Network(NetworkShape(layers=2, hidden=64, intermediate=64, heads=2, kv_heads=1), 40)
    large = Network(NetworkShape(layers=3, hidden=96, intermediate=96, heads=6, kv_heads=2), 40)
    widen(small, large)
    tokens = torch.arange(40).view(2, 20)
    before, after = (network.logits(network(tokens)) for network in (small, large))
    # The networks compute in bfloat16 and in different orders.
    assert (before - after).abs().max() < before.abs().max() / 20


def test_line_errors_are_differences_from_what_follows_from_the_line_before() -> None:
    errors = line_errors(QUESTION, "b = 22, c = 54, d = 24. Answer: 34")
    assert errors == [("+", 90), ("*", 0), ("-", 0)]


def test_a_staircases_reply_is_continued_in_each_round() -> None:
    from flashmoa_bench.family.inference import Reply, staircase_answers

    class FakeModel:
        """Answers with the number of its answers, and notes the beginnings that it is given."""

        def __init__(self) -> None:
            self.beginnings: list[str] = []

        def answer(
            self, prompts: list[list[dict[str, str]]], _t: float, beginnings: list[str], _n: int
        ) -> list[Reply]:
            self.beginnings += beginnings
            return [Reply(f"x{len(self.beginnings)}", 1.0)] * len(prompts)

    model = FakeModel()
    # Three rounds, of 4, 8 and 16 characters.
    replies = staircase_answers(model, [QUESTION], [("a" * 20,)], "rounds", 1)  # type: ignore[arg-type]
    assert replies == ["x1x2x3"]
    assert model.beginnings == ["", "x1", "x1x2"]
