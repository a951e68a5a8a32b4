"""Questions with known answers: short programs of two-digit arithmetic, in three grades.

A question is ``a = 47, b = a + 85, c = b * 07. Find c modulo 100.``, its worked answer
``b = 32, c = 24. Answer: 24``. Carries are what models get wrong. Each line can go wrong and
later ones build on it, so that a question is the harder the more lines it has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from flashmoa_bench.datasets import Item

Operator = Literal["+", "-", "*"]
Grade = Literal["easy", "medium", "hard"]
GRADES: tuple[Grade, ...] = ("easy", "medium", "hard")
# How many lines a question of each grade has, from and to; "a = 47" is not counted.
LINES: dict[Grade, tuple[int, int]] = {"easy": (1, 2), "medium": (3, 5), "hard": (6, 9)}
MODULUS = 100
# Each can be undone: no multiplication by 2 or 5, which would forget mistakes.
OPERANDS: dict[Operator, Sequence[int]] = {
    "+": range(1, MODULUS),
    "-": range(1, MODULUS),
    "*": (3, 7, 9),
}
_OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
NAMES = "abcdefghij"
_FINAL = re.compile(r"Answer: (\d\d)(?!\d)")
_VALUE = re.compile(r"[a-j] = (\d\d)")
# One in so many questions is held out: training never sees it, evaluation sees no other.
_HELD_OUT = 16


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """What a line does to the value before it."""

    operator: Operator
    operand: int

    def value(self, before: int) -> int:
        if self.operator == "+":
            return (before + self.operand) % MODULUS
        if self.operator == "-":
            return (before - self.operand) % MODULUS
        return before * self.operand % MODULUS


@dataclass(frozen=True, slots=True)
class Question:
    """A program: the first value, and the lines that follow."""

    start: int
    lines: tuple[ProgramLine, ...]

    @property
    def grade(self) -> Grade:
        return next(grade for grade in GRADES if len(self.lines) <= LINES[grade][1])

    @property
    def text(self) -> str:
        told = [f"a = {self.start:02}"]
        for name, line, before in zip(NAMES[1:], self.lines, NAMES, strict=False):
            told.append(f"{name} = {before} {line.operator} {line.operand:02}")
        return f"{', '.join(told)}. Find {NAMES[len(self.lines)]} modulo {MODULUS}."

    def values(self, slipped: Callable[[int, int], int] = lambda line, value: value) -> list[int]:
        """Return the value of each line; ``slipped`` may put another in place of a line's own."""
        values = [self.start]
        for number, line in enumerate(self.lines):
            values.append(slipped(number, line.value(values[-1])))
        return values[1:]

    @property
    def solution(self) -> str:
        """Return the right answer with its working."""
        return worked(self.values())

    @property
    def answer(self) -> str:
        """Return the two digits that are asked for."""
        return f"{self.values()[-1]:02}"

    @property
    def is_held_out(self) -> bool:
        return random.Random(self.text).random() * _HELD_OUT < 1


def worked(values: Sequence[int]) -> str:
    """Return an answer whose lines have these values."""
    lines = [f"{name} = {value:02}" for name, value in zip(NAMES[1:], values, strict=False)]
    return f"{', '.join(lines)}. Answer: {values[-1]:02}"


def final_answer(text: str) -> str | None:
    """Return the two digits that an answer ends with; None if it gives none."""
    found = _FINAL.findall(text)
    return found[-1] if found else None


def is_right(question: Question, text: str) -> bool:
    return final_answer(text) == question.answer


def slips(question: Question, text: str) -> list[tuple[Operator, int]]:
    """Return each line's operator and how far it is off what follows from the line before it."""
    found = list[tuple[Operator, int]]()
    before = question.start
    for line, value in zip(question.lines, map(int, _VALUE.findall(text)), strict=False):
        found.append((line.operator, (value - line.value(before)) % MODULUS))
        before = value
    return found


def questions(
    seed: int, grade: Grade | None = None, held_out: bool = False, largest: int = MODULUS - 1
) -> Iterator[Question]:
    """Yield random questions without end, the same for the same arguments.

    ``grade``: all of it, or every grade alike. ``held_out``: those for evaluation; otherwise
    those for training, which are never among them. ``largest``: of the operands.
    """
    dice = random.Random(f"{seed} {grade} {held_out}")
    while True:
        question = _random_question(dice, grade or dice.choice(GRADES), largest)
        if question.is_held_out == held_out:
            yield question


def _random_question(dice: random.Random, grade: Grade, largest: int) -> Question:
    count = dice.randint(*LINES[grade])
    operators: list[Operator] = [dice.choice(_OPERATORS) for _ in range(count)]
    return Question(
        dice.randrange(MODULUS),
        tuple(
            ProgramLine(operator, dice.choice(OPERANDS[operator][:largest]))
            for operator in operators
        ),
    )


def family_items(count: int, seed: int) -> list[Item]:
    """Return ``count`` held-out questions of each grade as a dataset, no two alike.

    They are the same for the same arguments.
    """
    found: list[Item] = []
    for grade in GRADES:
        asked = dict.fromkeys(islice(questions(seed, grade, held_out=True), 4 * count))
        found += [_item(question) for question in islice(asked, count)]
    return found


def _item(question: Question) -> Item:
    return Item(
        question.text,
        question.text,
        question.grade,
        lambda text: float(is_right(question, text)),
    )
