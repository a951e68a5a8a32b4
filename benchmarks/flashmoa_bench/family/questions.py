"""Generate questions with known answers: short programs of two-digit arithmetic, in three grades.

A question is ``a = 47, b = a + 85, c = b * 07. Find c modulo 100.``, and its solution is
``b = 32, c = 24. Answer: 24``. Models make mistakes with carries. Since each line builds on the one
before it, a question is the harder the more lines it has.
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
# Least and greatest number of lines of a question of each grade; "a = 47" is not counted.
LINES: dict[Grade, tuple[int, int]] = {"easy": (1, 2), "medium": (3, 5), "hard": (6, 9)}
MODULUS = 100
# Each operation can be undone. Multiplication by 2 or 5 cannot: it would hide earlier mistakes.
OPERANDS: dict[Operator, Sequence[int]] = {
    "+": range(1, MODULUS),
    "-": range(1, MODULUS),
    "*": (3, 7, 9),
}
_OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
NAMES = "abcdefghij"
_FINAL = re.compile(r"Answer: (\d\d)(?!\d)")
_VALUE = re.compile(r"[a-j] = (\d\d)")
# One in this many questions is held out: training never uses it, evaluation uses no others.
_HELD_OUT_EVERY = 16


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """One line of a program: an operation on the value of the line before it."""

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
    """A program: its first value, and the lines after that."""

    start: int
    lines: tuple[ProgramLine, ...]

    @property
    def grade(self) -> Grade:
        return next(grade for grade in GRADES if len(self.lines) <= LINES[grade][1])

    @property
    def text(self) -> str:
        lines = [f"a = {self.start:02}"]
        for name, line, before in zip(NAMES[1:], self.lines, NAMES, strict=False):
            lines.append(f"{name} = {before} {line.operator} {line.operand:02}")
        return f"{', '.join(lines)}. Find {NAMES[len(self.lines)]} modulo {MODULUS}."

    def values(self, change: Callable[[int, int], int] = lambda line, value: value) -> list[int]:
        """Return each line's value; ``change(line, value)`` may return another, as a mistake."""
        values = [self.start]
        for number, line in enumerate(self.lines):
            values.append(change(number, line.value(values[-1])))
        return values[1:]

    @property
    def solution(self) -> str:
        """Return the right answer with its working."""
        return write_solution(self.values())

    @property
    def answer(self) -> str:
        """Return the two digits of the right answer."""
        return f"{self.values()[-1]:02}"

    @property
    def is_held_out(self) -> bool:
        return random.Random(self.text).random() * _HELD_OUT_EVERY < 1


def write_solution(values: Sequence[int]) -> str:
    """Return an answer whose lines have these values."""
    lines = [f"{name} = {value:02}" for name, value in zip(NAMES[1:], values, strict=False)]
    return f"{', '.join(lines)}. Answer: {values[-1]:02}"


def final_answer(text: str) -> str | None:
    """Return the two digits of the last "Answer: ..." in a text; ``None`` without one."""
    answers = _FINAL.findall(text)
    return answers[-1] if answers else None


def is_right(question: Question, text: str) -> bool:
    return final_answer(text) == question.answer


def line_errors(question: Question, text: str) -> list[tuple[Operator, int]]:
    """Return, for each line of an answer, its operator and its error.

    The error is the difference from the value that follows from the line before; 0 if it is right.
    """
    errors = list[tuple[Operator, int]]()
    before = question.start
    for line, value in zip(question.lines, map(int, _VALUE.findall(text)), strict=False):
        errors.append((line.operator, (value - line.value(before)) % MODULUS))
        before = value
    return errors


def questions(
    seed: int, grade: Grade | None = None, held_out: bool = False, largest: int = MODULUS - 1
) -> Iterator[Question]:
    """Yield random questions without end, the same ones for the same arguments.

    Args:
        grade: grade of all questions; ``None`` for all grades equally often.
        held_out: whether to yield the questions for evaluation, or those for training, which are
            never the same.
        largest: largest operand.
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
    """Return ``count`` different held-out questions of each grade, as a dataset.

    They are the same for the same arguments.
    """
    items: list[Item] = []
    for grade in GRADES:
        unique = dict.fromkeys(islice(questions(seed, grade, held_out=True), 4 * count))
        items += [_make_item(question) for question in islice(unique, count)]
    return items


def _make_item(question: Question) -> Item:
    return Item(
        question.text,
        question.text,
        question.grade,
        lambda text: float(is_right(question, text)),
    )
