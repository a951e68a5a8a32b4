"""Read the lengths and similarities of real models' answers, and the turns of coding agents.

``answers.json`` and ``coding_agents.json`` have statistics of published records, without texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

# By parameters; Faster-MoA has a 4B, an 8B and a 32B model.
SIZES = ("small", "medium", "large")
FILE = Path(__file__).parent / "answers.json"
AGENTS_FILE = Path(__file__).parent / "coding_agents.json"


@dataclass(frozen=True, slots=True)
class RecordedQuestion:
    """One question, and recorded answers of models of several sizes.

    Attributes:
        number: place of the question in its published set, from 0.
        prompt, lengths: tokens of the question, and of the answers by size.
        similarities: similarity of two answers, in [0, 1], by their indices among all answers in
            the order of ``lengths``; the smaller index comes first.
    """

    number: int
    prompt: int
    lengths: Mapping[str, Sequence[int]]
    similarities: Mapping[tuple[int, int], float]

    def length(self, size: str, draw: int) -> int:
        """Return the tokens of an answer of a size; draws beyond the recorded ones start over."""
        lengths = self.lengths[size]
        return lengths[draw % len(lengths)]

    def similarity(self, one: tuple[str, int], other: tuple[str, int]) -> float:
        """Return the similarity of two answers, each given by its size and its draw.

        For twice the same answer, it is the mean of all, as if the model had been asked twice.
        """
        first, last = sorted((self._place(*one), self._place(*other)))
        if first == last:
            return fmean(self.similarities.values())
        return self.similarities[first, last]

    def _place(self, size: str, draw: int) -> int:
        sizes = list(self.lengths)
        before = sum(len(self.lengths[each]) for each in sizes[: sizes.index(size)])
        return before + draw % len(self.lengths[size])


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """A published set of answers, by models of several sizes."""

    source: str
    models: Mapping[str, Sequence[str]]
    questions: Sequence[RecordedQuestion]


def unpack(row: Sequence[Any], models: Mapping[str, Sequence[str]]) -> RecordedQuestion:
    """Return a question from a row of the file: number, prompt, lengths and similarities."""
    number, prompt, lengths, similarities = row
    remaining = iter(lengths)
    by_size = {size: [next(remaining) for _ in names] for size, names in models.items()}
    places = range(len(lengths))
    pairs = [(first, last) for first in places for last in places if first < last]
    scaled = (similarity / 1000 for similarity in similarities)
    return RecordedQuestion(number, prompt, by_size, dict(zip(pairs, scaled, strict=True)))


@cache
def load_recorded() -> Mapping[str, RecordedSet]:
    """Return the sets of recorded answers, by name."""
    document = json.loads(FILE.read_text())
    return {
        name: RecordedSet(
            one["source"],
            one["models"],
            [unpack(row, one["models"]) for row in one["questions"]],
        )
        for name, one in document["sets"].items()
    }


def spread(questions: Sequence[RecordedQuestion], count: int) -> list[RecordedQuestion]:
    """Return ``count`` questions whose longest answers are spread evenly, from short to long.

    They stand for all questions better than a random draw. The first ones are spread evenly too.
    """
    ordered = sorted(
        questions, key=lambda each: (max(map(max, each.lengths.values())), each.number)
    )
    count = min(count, len(ordered))
    middles = [(2 * place + 1) * len(ordered) // (2 * count) for place in range(count)]
    return [ordered[middles[place]] for place in _from_the_middle(count)]


def _from_the_middle(count: int) -> list[int]:
    """Return the numbers below ``count``: the middle, then the middles of the halves, and so on."""
    order: list[int] = []
    spans = [(0, count)]
    for begin, end in spans:  # Grows while it is read.
        if begin < end:
            middle = (begin + end) // 2
            order.append(middle)
            spans += [(begin, middle), (middle + 1, end)]
    return order


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One request of a recorded agent.

    Attributes:
        prompt, answer: numbers of tokens.
        result: tokens that the next prompt adds to this prompt and answer.
        gap: seconds from the answer to the next request, while tools run.
    """

    prompt: int
    answer: int
    result: int
    gap: float


@cache
def load_agents() -> Sequence[Sequence[RecordedTurn]]:
    """Return the turns of recorded coding agents; the agent with the fewest turns comes first."""
    agents: list[list[RecordedTurn]] = []
    for agent in json.loads(AGENTS_FILE.read_text())["agents"]:
        turns: list[list[int]] = agent["turns"]
        lengths = [prompt for prompt, _, _ in turns]
        nexts = [*lengths[1:], sum(turns[-1][:2])]
        agents.append(
            [
                RecordedTurn(prompt, answer, later - prompt - answer, gap / 1000)
                for (prompt, answer, gap), later in zip(turns, nexts, strict=True)
            ]
        )
    return agents
