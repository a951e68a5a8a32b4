"""What most of a debate's answers come to; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What an answer comes to: a number, a letter, ...; None where it comes to nothing.
Extract = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Vote:
    """How a debate was decided.

    Attributes:
        ballots: what each debater's last answer comes to; ``None``: nothing, or there was none.
        winner: what most come to; ``None`` where none comes to anything.
        count: how many do.
        place: the first debater who gave it, from 0.
    """

    ballots: tuple[str | None, ...]
    winner: str | None
    count: int
    place: int


def vote(answers: Sequence[str], extract: Extract) -> Vote:
    """Count what answers come to; an empty one is none.

    Where there is a tie, what was said first wins; where none comes to anything, the first answer
    that is not empty. Raises: ValueError where all are, and what ``extract`` raises.
    """
    given = [place for place, answer in enumerate(answers) if answer]
    if not given:
        raise ValueError("a vote needs an answer")
    ballots = tuple(extract(answer) if answer else None for answer in answers)
    # Of equally common ones, the first comes first.
    common = Counter(ballot for ballot in ballots if ballot is not None).most_common(1)
    if not common:
        return Vote(ballots, None, 0, given[0])
    winner, count = common[0]
    return Vote(ballots, winner, count, ballots.index(winner))
