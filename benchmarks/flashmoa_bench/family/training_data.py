"""What the models learn from: prompts with right answers, generated afresh for every step.

Some of the prompts are a proposer's, the others an aggregator's, in every form in which
``flashmoa.moa`` asks one. The answers that an aggregator sees are right or wrong as those of
half-trained proposers are: a line goes wrong, the later ones build on it; several proposers
slip in the same way; answers are cut, missing, or still being written.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flashmoa.moa.chunks import Schedule
from flashmoa.moa.prompts import Layout, conversation
from flashmoa_bench.family.prompts import AGGREGATION, MOST_ANSWERS, ORDERS, along, titled
from flashmoa_bench.family.questions import MODULUS, Grade, Operator, Question, questions, worked
from flashmoa_bench.family.tokenizer import PIECES

# As small was after "lines", at temperature 1: 0.3 of additions and subtractions went wrong and 0.1
# of multiplications, nine in ten by a carry; of two wrong lines four in five were alike.
_SLIPS: dict[Operator, float] = {"+": 1.3, "-": 1.3, "*": 0.4}
_TRAPPED = 0.8
_WHOLE = 0.95
# Shares of the aggregators' examples: whole answers, else a staircase.
_COMPLETE = 0.7
# The question is harder to find before the answers than behind them.
_LAYOUTS: tuple[Layout, ...] = (
    "answers-first",
    "question-first",
    "question-first",
    "question-first",
)


@dataclass(frozen=True, slots=True)
class Example:
    """Messages, what has been written of the reply, and the rest of the right one."""

    messages: list[dict[str, Any]]
    answer: str
    begun: str = ""


def examples(
    seed: int,
    count: int,
    aggregated: float = 0.0,
    grade: Grade | None = None,
    largest: int = MODULUS - 1,
    blind: float = 0.0,
) -> list[Example]:
    """Return the examples of one step, the same for the same arguments.

    ``aggregated``: the share of them that are an aggregator's. ``grade``: of their
    questions, None for all alike. ``largest``: of their operands. ``blind``: the share of
    aggregators' examples in which only the answers can tell.
    """
    dice = random.Random(seed)
    asked = questions(dice.getrandbits(48), grade, largest=largest)
    return [
        _aggregation(next(asked), dice, blind)
        if dice.random() < aggregated
        else single(next(asked))
        for _ in range(count)
    ]


def single(question: Question) -> Example:
    return Example(conversation(question.text), question.solution)


def _aggregation(question: Question, dice: random.Random, blind: float) -> Example:
    if blind and dice.random() < blind:
        return agreement(question, dice)
    answers = proposals(question, dice, dice.randint(1, MOST_ANSWERS))
    if dice.random() >= _COMPLETE:
        return staircase(question, answers, dice)
    return aggregation(question, answers, dice.choice(_LAYOUTS))


def aggregation(question: Question, answers: Sequence[str], layout: Layout) -> Example:
    """Make an example with whole answers; an empty one is not mentioned."""
    prompt = AGGREGATION[layout]
    return Example(prompt.messages(question.text, titled(prompt, answers)), question.solution)


def agreement(question: Question, dice: random.Random) -> Example:
    """Make an example whose question's lines are left out: what most answers say must do."""
    count = min(dice.randint(1, MOST_ANSWERS), dice.randint(1, MOST_ANSWERS))
    prompt = AGGREGATION[dice.choice(_LAYOUTS)]
    told = (
        question.text[: question.text.index(",")] + question.text[question.text.index(". Find") :]
    )
    slots = titled(prompt, proposals(question, dice, count))
    return Example(prompt.messages(told, slots), question.solution)


def staircase(question: Question, answers: Sequence[str], dice: random.Random) -> Example:
    """Make a round of a staircase: chunks of the answers, and what was written from them."""
    order = dice.choice(ORDERS)
    layout = dice.choice(_LAYOUTS) if order == "contiguous" else "question-first"
    schedule = Schedule(dice.choice((2, 4, 8, 8)), dice.choice((1.0, 2.0, 2.0)))
    sizes = list(islice(schedule, dice.randint(1, 3)))
    replies = _chunks(question.solution, sizes[:-1])
    messages = along(order, AGGREGATION[layout], question.text, answers, sizes, replies)
    written = "".join(replies)
    rest = question.solution[len(written) :]
    return Example(messages, rest, "" if order == "interleaved" else written)


def proposals(question: Question, dice: random.Random, count: int) -> list[str]:
    """Return answers as ``count`` proposers of different skill give them."""
    slips = dice.choice((0.03, 0.1, 0.25))
    # What is hard for one is hard for the others, and most slip there in the same way.
    chances = [slips * _SLIPS[line.operator] * dice.expovariate(1) for line in question.lines]
    traps = [_slip(dice) for _ in question.lines]
    return [
        _as_given(_attempt(question, [each * skill for each in chances], traps, dice), dice)
        for skill in (dice.uniform(0.2, 1.8) for _ in range(count))
    ]


def _attempt(
    question: Question, chances: Sequence[float], traps: Sequence[int], dice: random.Random
) -> str:
    """Return an answer in which each line goes wrong with the chance given."""

    def slipped(line: int, value: int) -> int:
        if dice.random() >= chances[line]:
            return value
        off = traps[line] if dice.random() < _TRAPPED else _slip(dice)
        return (value + off) % MODULUS

    return worked(question.values(slipped))


def _slip(dice: random.Random) -> int:
    """Draw how far off a line is: mostly a carry too many or too few."""
    if dice.random() < 0.85:
        return dice.choice((10, -10))
    return dice.randrange(1, 10) * dice.choice((10, 1))


def _as_given(answer: str, dice: random.Random) -> str:
    """Return the answer as a proposer leaves it: mostly whole, now and then cut or empty."""
    if dice.random() < _WHOLE:
        return answer
    return answer[: dice.randrange(len(answer))] if dice.random() < 0.7 else ""


def _chunks(text: str, sizes: Sequence[int]) -> list[str]:
    """Return the beginning of a text in chunks of so many tokens."""
    pieces = iter(re.findall(PIECES, text))
    return ["".join(islice(pieces, size)) for size in sizes]
