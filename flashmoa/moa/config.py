"""Describe a Mixture-of-Agents, a staircase or a debate by the tables of a TOML file.

name = "moa"                         # the model name in clients' requests
topology = "9-3-1"                   # or 9x9x1, all-to-all; the default is a tree
layout = "question-first"            # or answers-first

[early_exit]                         # without this table, every agent is waited for
embedder = "http://localhost:30002"  # the URL of an engine with an embedding model
rule = "sample"

[[layers]]                           # proposers first, the last aggregator last
models = [
    {engine = "http://localhost:30000", model = "small", repeat = 3, max_tokens = 512},
    {engine = "http://localhost:30001", model = "large", repeat = 6, temperature = 0.7},
]

``flashmoa.moa.serve.config_file`` reads files. ``docs/mixture-of-agents.md`` has all keys.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flashmoa import FlashMoAError
from flashmoa.moa.building import build_system, check_parts
from flashmoa.moa.early_exit import EarlyExit, Embedder, Rule
from flashmoa.moa.prompts import AggregationPrompt, Layout, Memory
from flashmoa.moa.run import System
from flashmoa.moa.sampling import Sampling
from flashmoa.moa.settings import Budget, Limits, Quorum, Steps

Kind = Literal["mixture", "staircase", "debate"]


class ConfigError(FlashMoAError):
    """Raised when a file does not describe a mixture; the message names the wrong key."""


class _Table(BaseModel):
    """A table of the file. Unknown keys in it are errors."""

    model_config = ConfigDict(extra="forbid")


class ModelConfig(Sampling):
    """``repeat`` agents with one model, and their sampling parameters.

    With several ``engines``, each agent asks another one first, and the others if that fails.
    ``extra_body`` has parameters of the engine that :class:`Sampling` does not know.
    """

    model_config = ConfigDict(strict=False)

    engine: str | None = None
    engines: list[str] = Field(default_factory=list[str])
    model: str = "default"
    api_key: str | None = None
    repeat: int = Field(default=1, ge=1)
    role: str = ""
    limits: Limits | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])

    @model_validator(mode="after")
    def _has_engine(self) -> ModelConfig:
        if (self.engine is None) == (not self.engines):
            raise ValueError("a model needs engine = 'URL', or engines = ['URL', ...]")
        return self

    @property
    def urls(self) -> list[str]:
        """Return the URLs of its engines."""
        return [self.engine] if self.engine is not None else self.engines

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters: ``temperature``, ``max_tokens``, ..."""
        return {**self.given_parameters(), **self.extra_body}


class PromptConfig(_Table):
    """An :class:`AggregationPrompt`; a key that is not given is that of the whole file's."""

    layout: Layout | None = None
    instruction: str | None = None
    heading: str | None = None
    closing: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the keys that are given."""
        names = [field.name for field in fields(AggregationPrompt)]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class LayerConfig(PromptConfig):
    """The models of one layer, their prompt, and the quorum of those who read them."""

    models: list[ModelConfig] = Field(min_length=1)
    quorum: Quorum | None = None


class EarlyExitConfig(_Table):
    """The arguments of :class:`EarlyExit`; ``embedder`` is an engine's URL.

    ``algorithm = "published"`` is :meth:`EarlyExit.as_published`.
    """

    embedder: str
    model: str = "default"
    api_key: str | None = None
    algorithm: Literal["ours", "published"] = "ours"
    tau: float = 0.7
    rule: Rule = "sample"
    threshold: float = 0.8
    min_answers: int = 2
    diagonal: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _has_keys_with_an_effect(self) -> EarlyExitConfig:
        without_effect: dict[str, str] = {}
        if self.algorithm == "published":
            fixed = ("tau", "rule", "threshold", "min_answers", "diagonal")
            without_effect = dict.fromkeys(fixed, "algorithm = 'published' has its own")
        elif self.rule == "sample":
            without_effect["threshold"] = "rule = 'sample' has none"
        else:
            without_effect["seed"] = "rule = 'threshold' draws no numbers"
        for name, reason in without_effect.items():
            if name in self.model_fields_set:
                raise ValueError(f"{name} is set, but {reason}; remove it")
        return self

    @property
    def least_answers(self) -> int:
        """Return the number of complete answers before which no exit is possible."""
        return 1 if self.algorithm == "published" else self.min_answers

    def build(self, embedder: Embedder) -> EarlyExit:
        """Return the policy."""
        if self.algorithm == "published":
            return EarlyExit.as_published(embedder, self.seed)
        given = self.model_dump(exclude={"embedder", "model", "api_key", "algorithm"})
        return EarlyExit(embedder, **given)


class FallbackConfig(_Table):
    """The arguments of :class:`Fallback`."""

    models: list[ModelConfig] = []
    best_answer: bool = True


class DebateConfig(_Table):
    """The arguments of :class:`Debate`.

    ``ballot`` is a regular expression: an answer's ballot is the first group of its last match, or
    the whole match if it has no group.
    """

    rounds: int = Field(default=2, ge=1)
    memory: Memory = "all"
    ballot: str | None = None

    @field_validator("ballot")
    @classmethod
    def _compiles(cls, ballot: str | None) -> str | None:
        try:
            re.compile(ballot or "")
        except re.error as error:
            raise ValueError(f"{ballot!r} is not a regular expression: {error}") from error
        return ballot

    def extract(self, answer: str) -> str | None:
        """Return the ballot in an answer."""
        matches = list(re.finditer(self.ballot or "", answer))
        return matches[-1][min(1, len(matches[-1].groups()))] if matches else None


class MixtureConfig(PromptConfig):
    """A whole file, or the table of one model in a file with several."""

    name: str = "moa"
    kind: Kind = "mixture"
    topology: str | None = None
    early_exit: EarlyExitConfig | None = None
    limits: Limits = Limits()
    quorum: Quorum | None = None
    budget: Budget | None = None
    fallback: FallbackConfig = FallbackConfig()
    staircase: Steps = Steps()
    debate: DebateConfig = DebateConfig()
    layers: list[LayerConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_its_parts(self) -> MixtureConfig:
        check_parts(self)
        return self

    @property
    def overlaps(self) -> bool:
        """Return whether agents read answers chunk by chunk; a debate does with that table."""
        return self.kind == "staircase" or "staircase" in self.model_fields_set

    async def build(self, stack: AsyncExitStack) -> System:
        """Build what the file describes.

        Args:
            stack: closes the clients of its engines.

        Raises:
            ConfigError: if the parts of the file do not fit together.
        """
        try:
            return await build_system(self, stack)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error
