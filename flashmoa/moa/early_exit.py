"""When the answers there are suffice, and those still being written can be left out.

Faster-MoA Algorithm 1: a score from how confident the answers are and how much they agree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from flashmoa.moa.similarity import frobenius_cosine, normalised

if TYPE_CHECKING:
    from flashmoa.moa.similarity import Embedding

Rule = Literal["sample", "threshold"]


class Embedder(Protocol):
    """Makes the embeddings that answers are compared by; one for all models."""

    async def embed(self, text: str) -> Embedding:
        """Last-layer hidden states, ``[tokens or sentences, hidden]``."""
        ...


@dataclass(frozen=True, slots=True)
class Quality:
    """What the answers so far are worth, each in [0, 1].

    Attributes:
        confidence: root mean square of the answers' confidences (line 5).
        agreement: their similarity, weighted by confidence, P (line 13).
        balance: how near P is to what is wanted of it, B (line 14): answers that are all the
            same add nothing to each other, answers that have nothing in common do not convince.
        score: Q (line 15).
    """

    confidence: float
    agreement: float
    balance: float
    score: float


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Whether a cluster's remaining proposers are worth waiting for.

    Args:
        embedder: for the answers' similarity.
        tau: the similarity that is wanted (0.7 in the paper).
        rule: leave with probability Q (``sample``, as the paper has it), or where Q is at least
            ``threshold``.
        min_answers: never leave before so many are there.
        diagonal: count each answer as similar to itself, as Algorithm 1's loops do. Then one
            answer alone has P = 1, and a cluster may well leave with it.
        seed: of the coin.
    """

    embedder: Embedder
    tau: float = 0.7
    rule: Rule = "sample"
    threshold: float = 0.8
    min_answers: int = 2
    diagonal: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1 or not 0 <= self.threshold <= 1 or self.min_answers < 1:
            raise ValueError("tau is in (0, 1], threshold in [0, 1], min_answers at least 1")

    @classmethod
    def as_published(cls, embedder: Embedder, seed: int = 0) -> EarlyExit:
        """Algorithm 1 to the letter."""
        return cls(embedder, min_answers=1, diagonal=True, seed=seed)

    def judges(self, agents: int) -> bool:
        """Whether a cluster of so many can be left at all, so that its answers are scored."""
        return agents > self.min_answers


@dataclass(slots=True)
class Answers:
    """The answers of one cluster, in the order in which they were finished."""

    policy: EarlyExit
    coin: random.Random
    _confidences: list[float] = field(default_factory=list[float])
    _embeddings: list[Embedding] = field(default_factory=list["Embedding"])
    # Row i: similarities to the answers before i.
    _similarities: list[list[float]] = field(default_factory=list[list[float]])

    def __len__(self) -> int:
        return len(self._confidences)

    async def add(self, text: str, logprobs: Sequence[float]) -> Quality:
        """One more answer, with its tokens' log-probabilities (natural)."""
        new = normalised(await self.policy.embedder.embed(text))
        self._similarities.append([frobenius_cosine(old, new) for old in self._embeddings])
        self._embeddings.append(new)
        self._confidences.append(confidence(logprobs))
        policy = self.policy
        return quality(
            self._confidences, self._similarities, tau=policy.tau, diagonal=policy.diagonal
        )

    def suffice(self, found: Quality) -> bool:
        """Whether to go on without the others."""
        policy = self.policy
        if len(self._confidences) < policy.min_answers:
            return False
        if policy.rule == "threshold":
            return found.score >= policy.threshold
        return self.coin.random() < found.score


def confidence(logprobs: Sequence[float]) -> float:
    """Geometric mean of the tokens' probabilities (line 4); 0 for an answer without any."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0


def quality(
    confidences: Sequence[float],
    similarities: Sequence[Sequence[float]],
    *,
    tau: float,
    diagonal: bool,
) -> Quality:
    """Lines 5 and 12 to 15 of Algorithm 1.

    Args:
        similarities: of each answer to those before it: row ``i`` has ``i`` numbers.
        diagonal: see :class:`EarlyExit`. Without, one answer alone has the score 0.
    """
    mean = (sum(one * one for one in confidences) / len(confidences)) ** 0.5
    pairs = [
        (confidences[i] * confidences[j], similarity)
        for i, row in enumerate(similarities)
        for j, similarity in enumerate(row)
    ]
    if diagonal:
        pairs += [(one * one, 1.0) for one in confidences]
    weight = sum(product for product, _ in pairs)
    if weight <= 0:
        return Quality(mean, 0.0, 0.0, 0.0)
    agreement = sum(product * similarity for product, similarity in pairs) / weight
    balance = min(1.0, max(0.0, 1 - abs(agreement - tau) / tau))
    return Quality(mean, agreement, balance, (mean * balance) ** 0.5)
