"""Log-probabilities to shares, and options to letters; pure."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase


def shares(logprobs: Sequence[float]) -> list[float]:
    """Probabilities in the same proportions that add up to 1 (softmax).

    Where all are zero, they are equal.
    """
    if not logprobs:
        return []
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(one - highest) for one in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def mass(logprobs: Sequence[float]) -> float:
    """The sum of the probabilities themselves."""
    return math.fsum(math.exp(one) for one in logprobs)


def letters(count: int) -> list[str]:
    """A letter for each option. Raises: ValueError where there are not so many."""
    if not 1 <= count <= len(LETTERS):
        raise ValueError(
            f"there are letters for 1 to {len(LETTERS)} options, not for {count}; ask about parts "
            "of them, about each with select(), or score their texts with score()"
        )
    return list(LETTERS[:count])
