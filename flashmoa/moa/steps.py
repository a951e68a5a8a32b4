"""How long chunks are, and where they stand in the aggregator's prompts; pure."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoa.moa.prompts import AggregationPrompt

Order = Literal["contiguous", "rounds", "interleaved"]

# That a token is taken for, so that chunks do not depend on how events cut a text.
CHARACTERS = 4

# One round's chunks, by proposer: texts, or what stands for them.
Chunks = Sequence[str]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long chunks are, in tokens (of four characters each, as texts are cut): ``first``, then
    ``growth`` times as long each round, at most ``largest``. The paper's first one is 8; its
    later ones are not given."""

    first: int = 8
    growth: float = 2.0
    largest: int = 128

    def __post_init__(self) -> None:
        if self.first < 1 or self.growth < 1 or self.largest < self.first:
            raise ValueError("a schedule needs first >= 1, growth >= 1 and largest >= first")

    def __iter__(self) -> Generator[int]:
        size = float(self.first)
        while True:
            yield int(size)
            size = min(float(self.largest), size * self.growth)


@dataclass(frozen=True, slots=True)
class Steps:
    """How a staircase is climbed.

    Attributes:
        schedule: how long the chunks are.
        order: how chunks stand in the prompt. ``contiguous``: each text in one piece, so that
            much of the prompt moves in every round. ``rounds``: one round's chunks after the
            other's, so that nothing moves but the answer so far, which stands behind them.
            ``interleaved``: each round's chunks, then what was written from them, in turns of the
            conversation, each of which begins with the last words of the one before; but for
            these nothing is computed twice.
        drop_repeats: leave out of an answer what a chunk of it says again of the end of those
            before it.
    """

    schedule: Schedule = field(default_factory=Schedule)
    order: Order = "rounds"
    drop_repeats: bool = True


def prompt_of(
    order: Order,
    prompt: AggregationPrompt,
    question: Sequence[dict[str, Any]],
    rounds: Sequence[Chunks],
    said: Sequence[str],
) -> list[dict[str, Any]]:
    """The messages before the aggregator's next chunk, without what it has ``said`` unless that
    is ``interleaved``.

    Chunks that are not contiguous bring their titles with them, so that one that is empty is not
    mentioned.
    """
    if order == "contiguous":
        texts = ["".join(pieces) for pieces in zip(*rounds, strict=True)]
        slots = [f"{prompt.title(n)}{text}" for n, text in enumerate(texts, 1)]
        return prompt.messages(question, slots)
    if order == "rounds":
        return prompt.messages(question, [chunk for chunks in rounds for chunk in chunks])
    talk = prompt.messages(question, rounds[0])
    for chunks, text in zip(rounds[1:], said, strict=True):
        talk += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "".join(chunks)},
        ]
    return talk


def last_words(text: str, count: int = 8) -> str:
    """The end of a text from one of its words on, with the white space behind the last; of a text
    without spaces between words as many characters as such words may have."""
    words = [word.start() for word in re.finditer(r"\S+", text)]
    begin = words[-count] if len(words) > count else 0
    return text[max(begin, len(text) - 10 * count) :]
