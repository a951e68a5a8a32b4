"""Generate the training examples of every step: prompts with right answers.

Some prompts are a proposer's, the others an aggregator's, in every form in which ``flashmoa.moa``
asks one. The answers in an aggregator's prompt have the mistakes of half-trained proposers: a line
goes wrong, and the later ones build on it; several proposers make the same mistake; answers are
cut, missing, or still being written.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flashmoa.moa.prompts import Layout, conversation
from flashmoa.moa.settings import Schedule
from flashmoa_bench.family.prompts import (
    AGGREGATION,
    MOST_ANSWERS,
    ORDERS,
    add_titles,
    staircase_prompt,
)
from flashmoa_bench.family.questions import (
    MODULUS,
    Grade,
    Operator,
    Question,
    questions,
    write_solution,
)
from flashmoa_bench.family.tokenizer import PIECES

# These are the mistakes of the small model after stage "lines", at temperature 1: it got 0.3 of
# additions and subtractions wrong and 0.1 of multiplications, nine in ten of them by a carry, and
# four in five pairs of wrong lines had the same mistake.
_MISTAKES: dict[Operator, float] = {"+": 1.3, "-": 1.3, "*": 0.4}
_SAME_MISTAKE = 0.8
_WHOLE = 0.95
# Share of the aggregators' examples with whole answers; the others are rounds of a staircase.
_COMPLETE = 0.7
# The question is harder to find before the answers than after them, so that this is trained more.
_LAYOUTS: tuple[Layout, ...] = (
    "answers-first",
    "question-first",
    "question-first",
    "question-first",
)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the beginning of the reply, if it has been written, and the right rest."""

    messages: list[dict[str, Any]]
    answer: str
    beginning: str = ""


def examples(
    seed: int,
    count: int,
    aggregated: float = 0.0,
    grade: Grade | None = None,
    largest: int = MODULUS - 1,
    blind: float = 0.0,
) -> list[Example]:
    """Return the examples of one step, the same ones for the same arguments.

    Args:
        aggregated: share of the examples that are an aggregator's.
        grade: grade of their questions; ``None`` for all grades equally often.
        largest: largest operand of their questions.
        blind: share of the aggregator's examples whose question has no lines.
    """
    dice = random.Random(seed)
    stream = questions(dice.getrandbits(48), grade, largest=largest)
    return [
        _make_aggregator_example(next(stream), dice, blind)
        if dice.random() < aggregated
        else _make_proposer_example(next(stream))
        for _ in range(count)
    ]


def _make_proposer_example(question: Question) -> Example:
    return Example(conversation(question.text), question.solution)


def _make_aggregator_example(question: Question, dice: random.Random, blind: float) -> Example:
    if blind and dice.random() < blind:
        return _make_blind_example(question, dice)
    answers = _make_proposals(question, dice, dice.randint(1, MOST_ANSWERS))
    if dice.random() >= _COMPLETE:
        return _make_staircase_example(question, answers, dice)
    prompt = AGGREGATION[dice.choice(_LAYOUTS)]
    return Example(prompt.messages(question.text, add_titles(prompt, answers)), question.solution)


def _make_blind_example(question: Question, dice: random.Random) -> Example:
    """Make an example whose question has no lines, so that only agreement tells the answer."""
    count = min(dice.randint(1, MOST_ANSWERS), dice.randint(1, MOST_ANSWERS))
    prompt = AGGREGATION[dice.choice(_LAYOUTS)]
    text = question.text
    without_lines = text[: text.index(",")] + text[text.index(". Find") :]
    slots = add_titles(prompt, _make_proposals(question, dice, count))
    return Example(prompt.messages(without_lines, slots), question.solution)


def _make_staircase_example(
    question: Question, answers: Sequence[str], dice: random.Random
) -> Example:
    """Make a round of a staircase, from chunks of the answers and the replies to earlier chunks."""
    order = dice.choice(ORDERS)
    layout = dice.choice(_LAYOUTS) if order == "contiguous" else "question-first"
    schedule = Schedule(dice.choice((2, 4, 8, 8)), dice.choice((1.0, 2.0, 2.0)))
    sizes = list(islice(schedule, dice.randint(1, 3)))
    written = _beginning(question.solution, sum(sizes[:-1]))
    messages = staircase_prompt(order, AGGREGATION[layout], question.text, answers, sizes)
    return Example(messages, question.solution[len(written) :], written)


def _make_proposals(question: Question, dice: random.Random, count: int) -> list[str]:
    """Return the answers of ``count`` proposers of different skill."""
    rate = dice.choice((0.03, 0.1, 0.25))
    # A line that is hard for one proposer is hard for all, and most make the same mistake in it.
    chances = [rate * _MISTAKES[line.operator] * dice.expovariate(1) for line in question.lines]
    common_errors = [_draw_error(dice) for _ in question.lines]
    return [
        _damage(_attempt(question, [each * skill for each in chances], common_errors, dice), dice)
        for skill in (dice.uniform(0.2, 1.8) for _ in range(count))
    ]


def _attempt(
    question: Question, chances: Sequence[float], common_errors: Sequence[int], dice: random.Random
) -> str:
    """Return an answer in which each line goes wrong with its chance in ``chances``."""

    def make_mistakes(line: int, value: int) -> int:
        if dice.random() >= chances[line]:
            return value
        error = common_errors[line] if dice.random() < _SAME_MISTAKE else _draw_error(dice)
        return (value + error) % MODULUS

    return write_solution(question.values(make_mistakes))


def _draw_error(dice: random.Random) -> int:
    """Draw the error of a line, which is mostly a carry too many or too few."""
    if dice.random() < 0.85:
        return dice.choice((10, -10))
    return dice.randrange(1, 10) * dice.choice((10, 1))


def _damage(answer: str, dice: random.Random) -> str:
    """Return the answer, which is sometimes cut or empty."""
    if dice.random() < _WHOLE:
        return answer
    return answer[: dice.randrange(len(answer))] if dice.random() < 0.7 else ""


def _beginning(text: str, count: int) -> str:
    """Return the first ``count`` tokens of a text."""
    return "".join(islice(iter(re.findall(PIECES, text)), count))
