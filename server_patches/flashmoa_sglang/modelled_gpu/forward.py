"""``Forward``: what one forward of an engine computes, as far as its time depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prefills:
    """Equal prefills that cost as much together as those of a forward.

    Args:
        requests: number of requests.
        tokens: new tokens of all requests together.
        cached: tokens before the new ones, per request, which attention reads.
    """

    requests: int = 0
    tokens: int = 0
    cached: int = 0

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> Prefills:
        """Return equal prefills for requests of given (cached tokens, new tokens).

        Requests, new tokens and the pairs of tokens that attention compares stay the same. Their
        times are tabulated for equal requests only.
        """
        pairs = [(cached, new) for cached, new in requests if new > 0]
        tokens = sum(new for _, new in pairs)
        if not tokens:
            return cls()
        compared = sum(new * (cached + new / 2) for cached, new in pairs)
        cached = compared / tokens - tokens / len(pairs) / 2
        return cls(len(pairs), tokens, max(0, round(cached)))


@dataclass(frozen=True, slots=True)
class Forward:
    """What one forward computes: prefills, and decodes of one token each.

    Args:
        decodes: number of requests that decode.
        context: tokens that each of them has on average, with the new one.
    """

    prefills: Prefills = Prefills()
    decodes: int = 0
    context: int = 0


class StepTimes(Protocol):
    """Says how long a GPU takes."""

    def seconds(self, forward: Forward) -> float:
        """Return the seconds that the GPU computes a forward."""
        ...
