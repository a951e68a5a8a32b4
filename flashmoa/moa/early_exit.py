"""Decide when complete answers suffice (``EarlyExit``), so that the other agents can be cancelled.

Faster-MoA Algorithm 1 scores the complete answers of a cluster by their confidence and their
agreement. Line numbers in this module are the algorithm's.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, runtime_checkable

import anyio
import anyio.lowlevel
from pydantic import Field, SkipValidation
from pydantic.dataclasses import dataclass as validated

from flashmoa import EngineClient
from flashmoa.errors import PluginMissing
from flashmoa.moa.settings import NO_OTHERS, Count

Rule = Literal["sample", "threshold"]

logger = logging.getLogger(__name__)


@runtime_checkable
class Embedder(Protocol):
    """Compares texts with an embedding model. The answers of all models go to one embedder."""

    async def compare(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Return a row for each text: its similarity to each text, in [0, 1] (lines 7 to 10)."""
        ...


@dataclass(frozen=True, slots=True)
class EngineEmbedder:
    """Compares texts by their tokens' states in an embedding model, as the paper does.

    Args:
        engine: an engine with the plugin and an embedding model, such as Qwen3-Embedding
            (``flashmoa serve --is-embedding``).
    """

    engine: EngineClient
    model: str = "default"

    async def compare(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the texts' Frobenius cosine similarities.

        Raises: PluginMissing if the engine does not compare texts, and other EngineErrors.
        """
        try:
            return await self.engine.similarities(texts, model=self.model)
        except PluginMissing as error:
            raise PluginMissing(
                f"{self.engine.url} does not compare answers by their token states; start the "
                "embedding model with `flashmoa serve --model-path MODEL --is-embedding`"
            ) from error


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
        embedder: compares the answers.
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

    def suffices(self, quality: Quality, rng: random.Random) -> bool:
        """Decide whether answers of that quality suffice. The rule ``sample`` is random."""
        if self.rule == "threshold":
            return quality.score >= self.threshold
        return rng.random() < quality.score


@dataclass(frozen=True, slots=True)
class Decision:
    """Records whether a cluster continued without the agents that were still writing.

    Attributes:
        answers: number of answers that were complete, at least ``min_answers``.
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
    _texts: list[str] = field(default_factory=list[str])

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
            self._texts.append(text)
            self._confidences.append(confidence(logprobs))
            answers = len(self._texts)
            if answers < policy.min_answers:
                return False
            try:
                # One answer is not compared with itself.
                rows = await policy.embedder.compare(self._texts) if answers > 1 else [[1.0]]
                quality = compute_quality(
                    self._confidences, rows, tau=policy.tau, diagonal=policy.diagonal
                )
            except Exception as error:
                self._is_broken = True
                problem = "No early exit for this cluster: its answers cannot be compared: %s"
                logger.warning(problem, error)
                return False
            # Nothing is decided if the cluster's last answer came while this one was compared.
            await anyio.lowlevel.checkpoint()
            exits = policy.suffices(quality, self.rng)
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
        similarities: row ``i`` has the similarities of answer ``i`` to all answers.
        diagonal: see :class:`EarlyExit`. Without it, a single answer has the score 0.
    """
    mean = (sum(value**2 for value in confidences) / len(confidences)) ** 0.5
    pairs = [
        (confidences[i] * confidences[j], similarity)
        for i, row in enumerate(similarities)
        for j, similarity in enumerate(row[:i])
    ]
    if diagonal:
        pairs += [(value**2, 1.0) for value in confidences]
    weight = sum(product for product, _ in pairs)
    if weight <= 0:
        return Quality(mean, 0.0, 0.0, 0.0)
    agreement = sum(product * similarity for product, similarity in pairs) / weight
    balance = min(1.0, max(0.0, 1 - abs(agreement - tau) / tau))
    return Quality(mean, agreement, balance, (mean * balance) ** 0.5)
