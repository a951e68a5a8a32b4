"""Build the prompts of the family's models, in the words that they were trained on.

A proposer's prompt is the question itself. An aggregator's prompt is the one that ``flashmoa.moa``
builds from the prompt in ``AGGREGATION`` for its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from flashmoa.moa.prompts import (
    AggregationPrompt,
    Layout,
    conversation,
    staircase_messages,
)
from flashmoa.moa.settings import CHARACTERS_PER_TOKEN, Order

_INSTRUCTION = "Combine the answers. Some are wrong."

AGGREGATION: dict[Layout, AggregationPrompt] = {
    layout: AggregationPrompt(layout, _INSTRUCTION, "\n{number}. ")
    for layout in ("answers-first", "question-first")
}

ORDERS: tuple[Order, ...] = ("contiguous", "rounds")
MOST_ANSWERS = 9
# The words of every prompt, which the tokenizer makes one token each.
WORDS = (
    *(" Find", " modulo", " 100", " Answer:"),
    *("Combine", " the", " answers", " Some", " are", " wrong"),
    *(f"\n{number}." for number in range(1, MOST_ANSWERS + 1)),
)


def add_titles(prompt: AggregationPrompt, answers: Sequence[str]) -> list[str]:
    """Return the answers, each after its title; an empty answer gets none."""
    return [f"{prompt.title(n)}{text}" if text else "" for n, text in enumerate(answers, 1)]


def staircase_prompt(
    order: Order,
    prompt: AggregationPrompt,
    question: str,
    answers: Sequence[str],
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    """Build the prompt of a ``Staircase``'s aggregator in one round, like ``staircase_messages``.

    Args:
        answers: whole answers, which are cut into chunks here.
        sizes: sizes of the chunks of all rounds so far, in tokens of ``CHARACTERS_PER_TOKEN``.
    """
    ends = list(accumulate((size * CHARACTERS_PER_TOKEN for size in sizes), initial=0))
    rounds = [[text[begin:end] for text in answers] for begin, end in pairwise(ends)]
    if order != "contiguous":
        rounds = [add_titles(prompt, chunks) for chunks in rounds]
    return staircase_messages(order, prompt, conversation(question), rounds)
