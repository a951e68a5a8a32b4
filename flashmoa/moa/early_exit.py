"""Decide when complete answers suffice (``EarlyExit``), so that the other agents can be cancelled.

Faster-MoA Algorithm 1 scores the complete answers of a cluster by their confidence and their
agreement. Line numbers in this module are the algorithm's.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, runtime_checkable

import anyio
import anyio.lowlevel
from pydantic import Field, SkipValidation
from pydantic.dataclasses import dataclass as validated

from flashmoa import EngineClient
from flashmoa._extras import FromExtra
from flashmoa.moa.settings import NO_OTHERS, Count

with FromExtra("moa", "flashmoa.moa", "numpy"):
    import numpy as np
    from numpy.typing import NDArray

Rule = Literal["sample", "threshold"]
# One row per token or sentence of a text, one column per feature: ``[rows, hidden]``.
Embedding = NDArray[np.float32]

logger = logging.getLogger(__name__)

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@runtime_checkable
class Embedder(Protocol):
    """The interface of an embedding model. The answers of all models go to one embedder."""

    async def embed(self, text: str) -> Embedding:
        """Return the last layer's hidden states, ``[tokens or sentences, hidden]``."""
        ...


@dataclass(frozen=True, slots=True)
class EngineEmbedder:
    """Computes one row per sentence with an embedding model, as Qwen3-Embedding in the paper.

    Args:
        engine: any server with ``/v1/embeddings``, such as ``flashmoa serve --is-embedding``.
    """

    engine: EngineClient
    model: str = "default"

    async def embed(self, text: str) -> Embedding:
        """Return the sentences' embeddings, ``[sentences, hidden]``.

        Raises: EngineError if the engine cannot compute them.
        """
        # Engines refuse to embed an empty list, so an empty text becomes one full stop.
        sentences = [part for part in _SENTENCE_END.split(text) if part.strip()] or ["."]
        rows = await self.engine.embed(sentences, model=self.model)
        return np.asarray(rows, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Quality:
    """The score of the answers so far and its parts, each in [0, 1].

    Attributes:
        confidence: root mean square of the answers' confidences (line 5).
        agreement: P, the answers' mean similarity, weighted by confidence (line 13).
        balance: B, the closeness of P to the target similarity (line 14). Answers that are all
            alike add nothing to each other; answers without anything in common are not reliable.
        score: Q (line 15).
    """

    confidence: float
    agreement: float
    balance: float
    score: float


@validated(config=NO_OTHERS, frozen=True, slots=True)
class EarlyExit:
    """Decides whether a cluster's remaining agents are worth waiting for.

    Args:
        embedder: computes the embeddings that answers are compared by.
        tau: target similarity (0.7 in the paper).
        rule: ``sample`` exits with probability Q, as in the paper; ``threshold`` exits when Q is
            at least ``threshold``.
        min_answers: least number of complete answers for an exit.
        diagonal: count each answer as similar to itself, as Algorithm 1's loops do. A single
            answer then has P = 1, so a cluster often exits with one answer.
        seed: seed of the random numbers that ``sample`` draws.

    Raises: ValueError if a number is out of its range.
    """

    embedder: SkipValidation[Embedder]
    tau: Annotated[float, Field(gt=0, le=1)] = 0.7
    rule: Rule = "sample"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    min_answers: Count = 2
    diagonal: bool = False
    seed: int = 0

    @classmethod
    def as_published(cls, embedder: Embedder, seed: int = 0) -> EarlyExit:
        """Return the policy that follows Algorithm 1 exactly."""
        return cls(embedder, min_answers=1, diagonal=True, seed=seed)

    def applies_to(self, agents: int) -> bool:
        """Return whether a cluster of that number of agents can exit early."""
        return agents > self.min_answers

    def suffices(self, quality: Quality, answers: int, rng: random.Random) -> bool:
        """Decide whether that number of answers suffices. The rule ``sample`` is random."""
        if answers < self.min_answers:
            return False
        if self.rule == "threshold":
            return quality.score >= self.threshold
        return rng.random() < quality.score


@dataclass(frozen=True, slots=True)
class Decision:
    """Records whether a cluster continued without the agents that were still writing.

    Attributes:
        answers: number of answers that were complete.
        of: number of agents in the cluster.
        left: whether the cluster continued without the other agents.
        seconds: time from the answer's completion to the decision, including the waits for the
            embedder and for the cluster's earlier decisions.
    """

    answers: int
    of: int
    quality: Quality
    left: bool
    seconds: float


@dataclass(slots=True)
class ScoredAnswers:
    """Scores a cluster's complete answers, in the order of their completion.

    Attributes:
        of: number of agents in the cluster.
        decisions: the decisions so far that were not cancelled.
    """

    policy: EarlyExit
    rng: random.Random
    of: int
    decisions: list[Decision] = field(default_factory=list[Decision])
    _is_broken: bool = False
    _scoring: anyio.Lock = field(default_factory=anyio.Lock)
    _confidences: list[float] = field(default_factory=list[float])
    _embeddings: list[Embedding] = field(default_factory=list[Embedding])
    # Row i has the similarities of answer i to the answers before it.
    _similarities: list[list[float]] = field(default_factory=list[list[float]])

    async def add_and_decide(self, name: str, text: str, logprobs: Sequence[float]) -> bool:
        """Add an agent's answer, and decide whether to go on without those still written.

        If the embedder fails, the cluster waits for all answers.

        Args:
            logprobs: natural log-probabilities of the answer's tokens.
        """
        if not logprobs and not self._confidences:
            problem = (
                "Early exit does not know how confident %s is: its engine sent no probabilities"
            )
            logger.warning(problem, name)
        started, policy = time.perf_counter(), self.policy
        async with self._scoring:
            if self._is_broken:
                return False
            try:
                embedding = await policy.embedder.embed(text)
                # To compare two long answers takes tens of milliseconds. In a thread, agents'
                # tokens do not wait for it.
                new, row = await anyio.to_thread.run_sync(_compare, embedding, self._embeddings)
            except Exception as error:
                self._is_broken = True
                problem = "No early exit for this cluster: its answers cannot be compared: %s"
                logger.warning(problem, error)
                return False
            self._similarities.append(row)
            self._embeddings.append(new)
            self._confidences.append(confidence(logprobs))
            quality = compute_quality(
                self._confidences, self._similarities, tau=policy.tau, diagonal=policy.diagonal
            )
            # Nothing is decided if the cluster's last answer came while this one was compared.
            await anyio.lowlevel.checkpoint()
            answers = len(self._confidences)
            exits = policy.suffices(quality, answers, self.rng)
            seconds = time.perf_counter() - started
            self.decisions.append(Decision(answers, self.of, quality, exits, seconds))
        return exits


def confidence(logprobs: Sequence[float]) -> float:
    """Return the geometric mean of the tokens' probabilities (line 4); 0 without tokens."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0


def compute_quality(
    confidences: Sequence[float],
    similarities: Sequence[Sequence[float]],
    *,
    tau: float,
    diagonal: bool,
) -> Quality:
    """Compute lines 5 and 12 to 15 of Algorithm 1.

    Args:
        similarities: row ``i`` has the similarities of answer ``i`` to the ``i`` answers before.
        diagonal: see :class:`EarlyExit`. Without it, a single answer has the score 0.
    """
    mean = (sum(value**2 for value in confidences) / len(confidences)) ** 0.5
    pairs = [
        (confidences[i] * confidences[j], similarity)
        for i, row in enumerate(similarities)
        for j, similarity in enumerate(row)
    ]
    if diagonal:
        pairs += [(value**2, 1.0) for value in confidences]
    weight = sum(product for product, _ in pairs)
    if weight <= 0:
        return Quality(mean, 0.0, 0.0, 0.0)
    agreement = sum(product * similarity for product, similarity in pairs) / weight
    balance = min(1.0, max(0.0, 1 - abs(agreement - tau) / tau))
    return Quality(mean, agreement, balance, (mean * balance) ** 0.5)


def _compare(embedding: Embedding, earlier: Sequence[Embedding]) -> tuple[Embedding, list[float]]:
    """Return an answer's features, and their similarities to earlier answers' features."""
    features = normalise(embedding)
    return features, [frobenius_cosine(other, features) for other in earlier]


def normalise(embedding: Embedding) -> Embedding:
    """Scale the columns of ``[n, hidden]`` to length 1; return the same shape.

    ``X.T @ X`` is then the features' correlation (lines 1, 2). A single row would keep only its
    signs, so it is scaled as a whole: the similarity of two single rows is their squared cosine.
    """
    axis = None if len(embedding) == 1 else 0
    lengths = np.linalg.norm(embedding, axis=axis, keepdims=True)
    return (embedding / np.maximum(lengths, 1e-12)).astype(np.float32)


def frobenius_cosine(one: Embedding, other: Embedding) -> float:
    """Return the Frobenius cosine similarity, in [0, 1], of two embeddings (lines 8, 9).

    With ``Corr = X.T @ X``, ``<Corr_u, Corr_v>`` is ``||X_u @ X_v.T||**2``. This takes ``n * m``
    products of ``hidden`` numbers instead of ``hidden**2`` products of ``n`` numbers, and no
    ``hidden x hidden`` matrix.

    Args:
        one, other: results of :func:`normalise`, ``[n, hidden]`` and ``[m, hidden]``.
    """
    product = _sum_of_squares(one @ other.T)
    norms = (_sum_of_squares(one @ one.T) * _sum_of_squares(other @ other.T)) ** 0.5
    return min(1.0, product / norms) if norms > 0 else 0.0


def _sum_of_squares(matrix: NDArray[np.float32]) -> float:
    return float(np.sum(np.square(matrix, dtype=np.float64)))
