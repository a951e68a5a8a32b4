"""A Mixture-of-Agents from a TOML file.

name = "moa"                         # as clients ask for it
topology = "9-3-1"                   # or 9x9x1: all-to-all; by default a tree
layout = "question-first"            # or answers-first

[early_exit]                         # left out: everybody is waited for
embedder = "local"                   # or the URL of an engine that embeds
rule = "sample"

[[layers]]                           # proposers first, the last aggregator last
models = [
    {engine = "http://localhost:30000", model = "small", repeat = 3, max_tokens = 512},
    {engine = "http://localhost:30001", model = "large", repeat = 6, temperature = 0.7},
]
"""

from __future__ import annotations

import tomllib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashmoa.engine import EngineClient, FlashMoAError
from flashmoa.moa.early_exit import EarlyExit, Rule
from flashmoa.moa.embedding import Embedder, EngineEmbedder, LocalEmbedder
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt, Layout


class ConfigError(FlashMoAError):
    """Raised when a file does not describe a mixture; says where it is wrong."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelConfig(BaseModel):
    """``repeat`` such agents. What is not named here is sampling: ``temperature``, ..."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    engine: str
    model: str = "default"
    api_key: str | None = None
    repeat: int = Field(default=1, ge=1)

    @property
    def sampling(self) -> dict[str, Any]:
        return self.model_extra or {}


class LayerConfig(_Part):
    models: list[ModelConfig] = Field(min_length=1)


class EarlyExitConfig(_Part):
    """As :class:`EarlyExit`; ``embedder``: ``local``, or an engine's URL."""

    embedder: str = "local"
    tau: float = 0.7
    rule: Rule = "sample"
    threshold: float = 0.8
    min_answers: int = 2
    diagonal: bool = False
    seed: int = 0


class MixtureConfig(_Part):
    """A whole file."""

    name: str = "moa"
    topology: str | None = None
    layout: Layout = "answers-first"
    instruction: str | None = None
    early_exit: EarlyExitConfig | None = None
    layers: list[LayerConfig] = Field(min_length=2)

    @classmethod
    def read(cls, path: Path) -> MixtureConfig:
        """Raises: OSError, ConfigError."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no TOML: {error}") from error
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors()
            )
            raise ConfigError(f"{path}: {problems}") from error

    async def build(self, stack: AsyncExitStack) -> MixtureOfAgents:
        """The mixture; ``stack`` closes its engines' clients. Raises: ConfigError."""
        engines: dict[tuple[str, str | None], EngineClient] = {}

        async def engine(url: str, api_key: str | None = None) -> EngineClient:
            if (url, api_key) not in engines:
                client = EngineClient(url, api_key=api_key)
                engines[url, api_key] = await stack.enter_async_context(client)
            return engines[url, api_key]

        try:
            layers = [
                [
                    Model(await engine(one.engine, one.api_key), one.model, one.sampling)
                    for one in layer.models
                    for _ in range(one.repeat)
                ]
                for layer in self.layers
            ]
            prompt = AggregationPrompt(self.layout)
            if self.instruction is not None:
                prompt = AggregationPrompt(self.layout, self.instruction)
            leave = None
            if (chosen := self.early_exit) is not None:
                url = chosen.embedder
                embedder: Embedder = (
                    LocalEmbedder() if url == "local" else EngineEmbedder(await engine(url))
                )
                leave = EarlyExit(embedder, **chosen.model_dump(exclude={"embedder"}))
            return MixtureOfAgents(layers, self.topology, prompt=prompt, early_exit=leave)
        except ValueError as error:
            raise ConfigError(str(error)) from error
