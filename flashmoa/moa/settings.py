"""Define the settings of mixtures, staircases and debates: limits, quorum, budget, steps"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

Order = Literal["contiguous", "rounds"]
# The assumed length of a token where no engine has counted. Chunks are always cut by it, so that
# they do not depend on how a server's events divide a text.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an agent may take, and how often its request is sent. Times are in seconds.

    Attributes:
        first_token_seconds: from the request to the first token, waiting in the engine included.
        stall_seconds: between two tokens.
        answer_seconds: for the whole answer. After this time the answer ends where it is, as if it
            had reached its ``max_tokens``.
        attempts: how many requests may be sent, to the model's engines in turn; ``None``: one to
            each engine. An answer that broke off is continued, not begun anew.

    ``None`` for a time is no limit. Raises: ValueError if a number is not positive.
    """

    first_token_seconds: float | None = 120.0
    stall_seconds: float | None = 60.0
    answer_seconds: float | None = None
    attempts: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise ValueError(f"{limit.name} is {value}; it must be positive")


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many answers suffice after some time.

    Once ``seconds`` have passed since the first request to agents that are read together, and
    ``answers`` of them are complete, the others are left out.

    Raises: ValueError if a number is out of its range.
    """

    answers: int
    seconds: float

    def __post_init__(self) -> None:
        if self.answers < 1:
            raise ValueError(f"answers is {self.answers}; a quorum needs at least 1 answer")
        if not self.seconds >= 0:
            raise ValueError(f"seconds is {self.seconds}; it must not be negative")


def check_quorums(quorums: Sequence[Quorum | None], sizes: Sequence[Sequence[int]]) -> None:
    """Check that no quorum needs more answers than are read together anywhere.

    Args:
        quorums: those of the layers that are read; one may be the quorum of several layers.
        sizes: for each of these layers, how many answers are read together.

    Raises: ValueError if one does.
    """
    for quorum in quorums:
        layers = [number for number, other in enumerate(quorums) if other is quorum]
        most = max(size for number in layers for size in sizes[number])
        if quorum is not None and quorum.answers > most:
            raise ValueError(
                f"the quorum of layer {', '.join(map(str, layers))} (from 0) needs "
                f"{quorum.answers} answers, but at most {most} are read together"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """What one question may cost. Once that is spent, no further agent is asked.

    Agents that were asked before write on, so that somewhat more is spent. While they write, their
    tokens are estimated: four characters of a prompt are a token.

    Attributes:
        tokens: tokens of all prompts and answers together.
        reserve: how many of them are kept for the agent that writes the last answer.

    Raises: ValueError if a number is out of its range.
    """

    tokens: int
    reserve: int = 0

    def __post_init__(self) -> None:
        if not self.tokens > 0:
            raise ValueError(f"tokens is {self.tokens}; a budget must be positive")
        if not 0 <= self.reserve < self.tokens:
            raise ValueError(
                f"reserve is {self.reserve}; it must be less than tokens, which is {self.tokens}"
            )


@dataclass(frozen=True, slots=True)
class Steps:
    """The settings of a staircase: how long chunks are, and how they stand in the prompt.

    Attributes:
        first: the length of the first chunk, in tokens of four characters (8 in the paper).
        growth, largest: each later chunk has ``growth`` times as many tokens as the one before it,
            at most ``largest``. The paper does not give them.
        order: the order of chunks in the prompt. ``contiguous``: each text in one piece, so that
            a large part of the prompt moves in every round. ``rounds``: the chunks of one round
            after those of the round before, so that only the answer so far moves, which follows
            them.

    Raises: ValueError if a number is out of its range.
    """

    first: int = 8
    growth: float = 2.0
    largest: int = 128
    order: Order = "rounds"

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError(f"first is {self.first}; a chunk needs at least 1 token")
        if self.growth < 1:
            raise ValueError(f"growth is {self.growth}; it must be at least 1")
        if self.largest < self.first:
            raise ValueError(
                f"largest is {self.largest}; it must be at least first, which is {self.first}"
            )

    def sizes(self) -> Generator[int]:
        """Yield the length of each chunk in tokens, without end."""
        size = float(self.first)
        while True:
            yield int(size)
            size = min(float(self.largest), size * self.growth)
