"""Results of scoring (``Scores``, ``Selection``), and its costs in tokens (``PrefillUsage``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel

from flashmoa.engine import StreamUse


@dataclass(frozen=True, slots=True)
class PrefillUsage:
    """Counts a scoring call's prefills and their tokens.

    Attributes:
        cached_tokens: number of prompt tokens that were in the radix cache, or that a sibling
            request computed.
        streamed_tokens: number of cached tokens from the context's prompt stream.
        prompt_stream: how that stream was used, if there was one.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    streamed_tokens: int | None = None
    prompt_stream: StreamUse | None = None

    @property
    def computed_tokens(self) -> int:
        """Return the number of prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens

    def __add__(self, other: PrefillUsage) -> PrefillUsage:
        """Return the usage of both, without their prompt streams."""
        return PrefillUsage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """How likely each candidate is to follow the context.

    Attributes:
        candidates: names of the candidates, in the order given.
        logprobs: natural logarithm of each candidate's probability, over all its tokens together.
        probabilities: these probabilities, scaled so that they add up to 1.
        mass: the sum of the probabilities before scaling. If it is small, the model would rather
            write anything but a candidate, and the scaled probabilities mean little.
    """

    candidates: list[str]
    logprobs: list[float]
    probabilities: list[float]
    mass: float
    usage: PrefillUsage

    @property
    def best(self) -> str:
        """Return the likeliest candidate. Among equally likely ones, return the first."""
        return self.candidates[self.probabilities.index(max(self.probabilities))]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        logprobs: Sequence[float],
        lengths: Sequence[int] | None,
        usage: PrefillUsage,
    ) -> Self:
        """Return the scores of named candidates.

        Args:
            lengths: number of tokens in each candidate, to compare mean log-probabilities by
                token; ``None`` to compare their sums.
        """
        weights = list(logprobs)
        if lengths is not None:
            weights = [total / length for total, length in zip(logprobs, lengths, strict=True)]
        return cls(list(names), list(logprobs), softmax(weights), probability_mass(logprobs), usage)


@dataclass(frozen=True, slots=True)
class Selection:
    """Options that the model has judged one by one.

    Attributes:
        probabilities: for each option, the probability of a yes if only yes and no count.
        chosen: the options whose probability is at least the threshold.
        answers: for each option, the scores of yes and no.
    """

    options: list[str]
    probabilities: list[float]
    chosen: list[str]
    answers: list[Scores]
    usage: PrefillUsage


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, its index in the given list, and how likely it is relevant."""

    index: int
    document: str
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, the most relevant first."""

    documents: list[RankedDocument]
    usage: PrefillUsage


class ItemScores(BaseModel):
    """The answer to one prompt: each candidate's tokens and log-probability."""

    logprobs: list[float | None]
    candidate_tokens: list[list[int]]
    prefills: int
    prompt_tokens: int
    computed_tokens: int
    # Of the only item's context, if it has a prompt stream.
    streamed_tokens: int | None = None
    prompt_stream: StreamUse | None = None

    def scores(self, names: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        """Return the scores of named candidates; see :meth:`Scores.of`."""
        logprobs = [-math.inf if value is None else value for value in self.logprobs]
        usage = PrefillUsage(
            self.prefills,
            self.prompt_tokens,
            self.prompt_tokens - self.computed_tokens,
            self.streamed_tokens,
            self.prompt_stream,
        )
        return Scores.of(names, logprobs, lengths, usage)


def softmax(logprobs: Sequence[float]) -> list[float]:
    """Scale probabilities so that they add up to 1. If all are zero, return equal ones."""
    if not logprobs:
        return []
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def probability_mass(logprobs: Sequence[float]) -> float:
    """Return the sum of the probabilities."""
    return math.fsum(math.exp(logprob) for logprob in logprobs)
