"""The results of scoring: candidates with their probabilities, and what computing them took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from flashmoa.engine import PromptUsage, StreamUse


@dataclass(frozen=True, slots=True)
class PrefillUsage:
    """What scoring took, in tokens, all requests together.

    Attributes:
        requests: the number of prefills.
        prompt_tokens: of their prompts.
        cached_tokens: those of them found in the radix cache, or computed by a sibling request.
            ``None`` where the engine does not say.
        decoded_tokens: always 0, as the engine reports.
        streamed_tokens: those of the cached tokens that the context's prompt stream had computed.
        prompt_stream: what became of that stream, if there was one.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = 0
    decoded_tokens: int = 0
    streamed_tokens: int | None = None
    prompt_stream: StreamUse | None = None

    @property
    def computed_tokens(self) -> int | None:
        """Return the prompt tokens that were computed, each counted once."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens

    @classmethod
    def of(cls, prefills: Iterable[PromptUsage]) -> Self:
        """Return the usage of several prefills together."""
        each = list(prefills)
        cached = [one.cached_tokens for one in each]
        streamed = next((one for one in each if one.prompt_stream is not None), None)
        return cls(
            len(each),
            sum(one.prompt_tokens for one in each),
            None if None in cached else sum(one or 0 for one in cached),
            sum(one.completion_tokens for one in each),
            streamed and streamed.streamed_tokens,
            streamed and streamed.prompt_stream,
        )

    def __add__(self, other: PrefillUsage) -> PrefillUsage:
        """Return the usage of both, without what became of prompt streams."""
        cached = (self.cached_tokens, other.cached_tokens)
        return PrefillUsage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            None if None in cached else sum(one or 0 for one in cached),
            self.decoded_tokens + other.decoded_tokens,
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Candidates, and how likely each one is to follow the context.

    Attributes:
        candidates: their names, in the order given.
        logprobs: the natural logarithm of each one's probability, over all its tokens together.
        probabilities: in the proportions of those probabilities, adding up to 1.
        mass: the sum of the probabilities themselves. Where it is small, the model would rather
            write something else than any candidate, and the proportions mean little.
    """

    candidates: list[str]
    logprobs: list[float]
    probabilities: list[float]
    mass: float
    usage: PrefillUsage

    @property
    def best(self) -> str:
        """Return the likeliest candidate, the first one of equals."""
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
            lengths: the number of each one's tokens, if its mean log-probability by token counts.
        """
        weighed = list(logprobs)
        if lengths is not None:
            weighed = [one / length for one, length in zip(logprobs, lengths, strict=True)]
        return cls(list(names), list(logprobs), softmax(weighed), probability_mass(logprobs), usage)


@dataclass(frozen=True, slots=True)
class Selection:
    """Options, each judged on its own.

    Attributes:
        options: in the order given.
        probabilities: for each option, that of a yes over yes and no.
        chosen: the options at least as likely as the threshold.
        answers: for each option, the scores of yes and no.
    """

    options: list[str]
    probabilities: list[float]
    chosen: list[str]
    answers: list[Scores]
    usage: PrefillUsage


def softmax(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities in the same proportions that add up to 1; equal ones if all are zero."""
    if not logprobs:
        return []
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(one - highest) for one in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def probability_mass(logprobs: Sequence[float]) -> float:
    """Return the sum of the probabilities themselves."""
    return math.fsum(math.exp(one) for one in logprobs)
