"""What scoring answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from flashmoa.engine import PromptUsage, StreamUse
from flashmoa.scoring.distribution import mass, shares


@dataclass(frozen=True, slots=True)
class PrefillUsage:
    """What it took, in tokens, all requests together.

    Attributes:
        requests: prefills.
        prompt_tokens: of their prompts.
        cached_tokens: of these, found in the radix cache, or computed by a request beside it.
            ``None`` where the engine does not say.
        decoded_tokens: always 0; as the engine says.
        streamed_tokens: of the cached, computed by the context's prompt stream beforehand.
        prompt_stream: what became of that, if there was one.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = 0
    decoded_tokens: int = 0
    streamed_tokens: int | None = None
    prompt_stream: StreamUse | None = None

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were computed, each once."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens

    @classmethod
    def of(cls, prefills: Iterable[PromptUsage]) -> Self:
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
        """Of both; what became of prompt streams is left out."""
        cached = (self.cached_tokens, other.cached_tokens)
        return PrefillUsage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            None if None in cached else sum(one or 0 for one in cached),
            self.decoded_tokens + other.decoded_tokens,
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Candidates and how likely each one is to follow the context.

    Attributes:
        candidates: their names, in the order given.
        logprobs: natural logarithm of each one's probability; of all its tokens together, where
            it has several.
        probabilities: in proportion to those, adding up to 1.
        mass: the sum of the probabilities themselves. Where it is small, the model would say
            something else than any of the candidates, and their proportions mean little.
    """

    candidates: list[str]
    logprobs: list[float]
    probabilities: list[float]
    mass: float
    usage: PrefillUsage

    @property
    def best(self) -> str:
        """The likeliest; of equals the first."""
        return self.candidates[self.probabilities.index(max(self.probabilities))]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        logprobs: Sequence[float],
        lengths: Sequence[int] | None,
        usage: PrefillUsage,
    ) -> Self:
        """``lengths``: tokens of each, where probabilities are to be by token (its mean)."""
        weighed = list(logprobs)
        if lengths is not None:
            weighed = [one / length for one, length in zip(logprobs, lengths, strict=True)]
        return cls(list(names), list(logprobs), shares(weighed), mass(logprobs), usage)


@dataclass(frozen=True, slots=True)
class Selection:
    """Options, each judged by itself.

    Attributes:
        options: in the order given.
        probabilities: that of a yes, over yes and no, for each.
        chosen: those at least as likely as the threshold.
        answers: the scores of yes and no behind it, for each.
    """

    options: list[str]
    probabilities: list[float]
    chosen: list[str]
    answers: list[Scores]
    usage: PrefillUsage
