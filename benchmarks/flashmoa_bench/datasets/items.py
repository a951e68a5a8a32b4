"""A question with its scoring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """What to ask, and whether an answer is right.

    Attributes:
        id: the publisher's, or the number of its line.
        question: the user's message: the question, and how the answer is to be given.
        group: its difficulty or subject.
        score: of a whole answer: 0 (wrong, or none given) to 1. What a model thinks aloud before
            ``</think>`` does not count.
    """

    id: str
    question: str
    group: str
    score: Callable[[str], float]
