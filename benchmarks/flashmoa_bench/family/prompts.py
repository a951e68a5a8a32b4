"""What the models of the family are asked, in the words they were trained on.

A proposer is asked the question, as it is. An aggregator is asked as ``flashmoa.moa`` does with
the prompt of ``AGGREGATION`` for its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from flashmoa.moa.chunks import CHARACTERS_PER_TOKEN
from flashmoa.moa.prompts import (
    AggregationPrompt,
    Layout,
    Order,
    conversation,
    staircase_messages,
)

_INSTRUCTION = "Combine the answers. Some are wrong."

AGGREGATION: dict[Layout, AggregationPrompt] = {
    layout: AggregationPrompt(layout, _INSTRUCTION, "\n{number}. ")
    for layout in ("answers-first", "question-first")
}

ORDERS: tuple[Order, ...] = ("contiguous", "rounds", "interleaved")
MOST_ANSWERS = 9
# One token each, as are the beginnings of lines: what stands in every prompt.
WORDS = (
    *(" Find", " modulo", " 100", " Answer:"),
    *("Combine", " the", " answers", " Some", " are", " wrong"),
    *(f"\n{number}." for number in range(1, MOST_ANSWERS + 1)),
)


def titled(prompt: AggregationPrompt, answers: Sequence[str]) -> list[str]:
    """Return the slots of answers: each behind its title, an empty one without."""
    return [f"{prompt.title(n)}{text}" if text else "" for n, text in enumerate(answers, 1)]


def along(
    order: Order,
    prompt: AggregationPrompt,
    question: str,
    answers: Sequence[str],
    sizes: Sequence[int],
    replies: Sequence[str],
) -> list[dict[str, Any]]:
    """Build what a ``Staircase``'s aggregator is asked in a round, like ``staircase_messages``.

    ``answers``: whole; their chunks are cut here. ``sizes``: of the chunks that have come, in
    tokens of ``CHARACTERS_PER_TOKEN``. ``replies``: the aggregator's own of the rounds before.
    """
    ends = list(accumulate((size * CHARACTERS_PER_TOKEN for size in sizes), initial=0))
    rounds = [[text[begin:end] for text in answers] for begin, end in pairwise(ends)]
    if order != "contiguous":
        rounds = [titled(prompt, chunks) for chunks in rounds]
    return staircase_messages(order, prompt, conversation(question), rounds, replies)
