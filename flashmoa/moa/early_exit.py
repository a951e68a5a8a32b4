"""Early exit: go on with the answers that are complete when they are good enough.

Faster-MoA Algorithm 1 scores the complete answers of a cluster by how confident they are and how
much they agree; the agents that still write may then be cancelled. Line numbers are those of the
algorithm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flashmoa.moa.embedding import Embedder, Embedding

Rule = Literal["sample", "threshold"]

_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Quality:
    """The score of the answers so far and its parts, each in [0, 1].

    Attributes:
        confidence: root mean square of the answers' confidences (line 5).
        agreement: mean similarity of the answers, weighted by confidence, P (line 13).
        balance: how near P is to the wanted similarity, B (line 14). Answers that are all the
            same add nothing to each other; answers that have nothing in common do not convince.
        score: Q (line 15).
    """

    confidence: float
    agreement: float
    balance: float
    score: float


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """The policy that decides whether a cluster's remaining agents are worth waiting for.

    Args:
        embedder: gives the embeddings by which answers are compared.
        tau: the wanted similarity (0.7 in the paper).
        rule: ``sample`` leaves with probability Q, as in the paper; ``threshold`` leaves when Q
            is at least ``threshold``.
        min_answers: never leave before so many answers are complete.
        diagonal: count each answer as similar to itself, as Algorithm 1's loops do. A single
            answer then has P = 1, so a cluster may well leave with one answer.
        seed: of the random numbers that ``sample`` draws.

    Raises: ValueError if a number is out of its range.
    """

    embedder: Embedder
    tau: float = 0.7
    rule: Rule = "sample"
    threshold: float = 0.8
    min_answers: int = 2
    diagonal: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau is {self.tau}; it must be in (0, 1]")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it must be in [0, 1]")
        if self.min_answers < 1:
            raise ValueError(f"min_answers is {self.min_answers}; it must be at least 1")

    @classmethod
    def as_published(cls, embedder: Embedder, seed: int = 0) -> EarlyExit:
        """Return the policy that follows Algorithm 1 to the letter."""
        return cls(embedder, min_answers=1, diagonal=True, seed=seed)

    def applies_to(self, agents: int) -> bool:
        """Return whether a cluster of so many agents can be left early at all."""
        return agents > self.min_answers


@dataclass(slots=True)
class ScoredAnswers:
    """The complete answers of one cluster, in the order in which they were completed."""

    policy: EarlyExit
    rng: random.Random
    _confidences: list[float] = field(default_factory=list[float])
    _embeddings: list[Embedding] = field(default_factory=list[Embedding])
    # Row i: similarities to the answers before i.
    _similarities: list[list[float]] = field(default_factory=list[list[float]])

    def __len__(self) -> int:
        return len(self._confidences)

    async def add(self, text: str, logprobs: Sequence[float]) -> Quality:
        """Add an answer and return the quality of all answers so far.

        Args:
            logprobs: natural log-probabilities of the answer's tokens.

        Raises: what the embedder raises.
        """
        new = normalised(await self.policy.embedder.embed(text))
        self._similarities.append([frobenius_cosine(old, new) for old in self._embeddings])
        self._embeddings.append(new)
        self._confidences.append(confidence(logprobs))
        policy = self.policy
        return quality(
            self._confidences, self._similarities, tau=policy.tau, diagonal=policy.diagonal
        )

    def suffice(self, found: Quality) -> bool:
        """Return whether to go on without the other answers; ``sample`` draws a number."""
        policy = self.policy
        if len(self._confidences) < policy.min_answers:
            return False
        if policy.rule == "threshold":
            return found.score >= policy.threshold
        return self.rng.random() < found.score


def confidence(logprobs: Sequence[float]) -> float:
    """Return the geometric mean of the tokens' probabilities (line 4); 0 without tokens."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0


def quality(
    confidences: Sequence[float],
    similarities: Sequence[Sequence[float]],
    *,
    tau: float,
    diagonal: bool,
) -> Quality:
    """Compute lines 5 and 12 to 15 of Algorithm 1.

    Args:
        similarities: of each answer to those before it: row ``i`` has ``i`` numbers.
        diagonal: see :class:`EarlyExit`. Without it, a single answer has the score 0.
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


def normalised(embedding: Embedding) -> Embedding:
    """Scale columns to length 1, so that ``X.T @ X`` is the features' correlation (lines 1, 2).

    Takes and returns ``[n, hidden]``.
    """
    lengths = np.linalg.norm(embedding, axis=0, keepdims=True)
    return (embedding / np.maximum(lengths, _TINY)).astype(np.float32)


def frobenius_cosine(one: Embedding, other: Embedding) -> float:
    """Return the Frobenius cosine similarity, in [0, 1], of two embeddings (lines 8, 9).

    Takes :func:`normalised` embeddings, ``[n, hidden]`` and ``[m, hidden]``. With
    ``Corr = X.T @ X``, ``<Corr_u, Corr_v>`` is ``||X_u @ X_v.T||**2``: ``n * m`` products of
    ``hidden`` numbers instead of ``hidden**2`` of ``n``, and no ``hidden x hidden`` matrix.
    """
    both = _squares(one @ other.T)
    alone = (_squares(one @ one.T) * _squares(other @ other.T)) ** 0.5
    return min(1.0, both / alone) if alone > _TINY else 0.0


def _squares(matrix: NDArray[np.float32]) -> float:
    return float(np.sum(np.square(matrix, dtype=np.float64)))
