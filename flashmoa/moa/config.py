"""Read the TOML file that describes a Mixture-of-Agents (``MixtureConfig``).

name = "moa"                         # the model name in clients' requests
topology = "9-3-1"                   # or 9x9x1, all-to-all; the default is a tree
layout = "question-first"            # or answers-first

[early_exit]                         # without this table, every agent is waited for
embedder = "local"                   # or the URL of an engine with an embedding model
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

from flashmoa import EngineClient, FlashMoAError
from flashmoa.moa.agents import Model
from flashmoa.moa.early_exit import EarlyExit, Rule
from flashmoa.moa.embedding import Embedder, EngineEmbedder, LocalEmbedder
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.prompts import AggregationPrompt, Layout


class ConfigError(FlashMoAError):
    """Raised when a file does not describe a mixture; the message names the wrong key."""


class _Table(BaseModel):
    """A table of the file. Unknown keys in it are errors."""

    model_config = ConfigDict(extra="forbid")


class ModelConfig(BaseModel):
    """``repeat`` agents with one model. Keys not named here are sampling parameters."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    engine: str
    model: str = "default"
    api_key: str | None = None
    repeat: int = Field(default=1, ge=1)

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters: ``temperature``, ``max_tokens``, ..."""
        return self.model_extra or {}


class LayerConfig(_Table):
    """The models of one layer."""

    models: list[ModelConfig] = Field(min_length=1)


class EarlyExitConfig(_Table):
    """The arguments of :class:`EarlyExit`; ``embedder`` is ``local`` or an engine's URL."""

    embedder: str = "local"
    tau: float = 0.7
    rule: Rule = "sample"
    threshold: float = 0.8
    min_answers: int = 2
    diagonal: bool = False
    seed: int = 0


class MixtureConfig(_Table):
    """The whole file."""

    name: str = "moa"
    topology: str | None = None
    layout: Layout = "answers-first"
    instruction: str | None = None
    early_exit: EarlyExitConfig | None = None
    layers: list[LayerConfig] = Field(min_length=2)

    @classmethod
    def read(cls, path: Path) -> MixtureConfig:
        """Read a file.

        Raises:
            OSError: if it cannot be read.
            ConfigError: if it does not describe a mixture.
        """
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
                for problem in error.errors()
            ]
            raise ConfigError(f"{path}: {'; '.join(problems)}") from error

    async def build(self, stack: AsyncExitStack) -> MixtureOfAgents:
        """Build the mixture.

        Args:
            stack: closes the clients of its engines.

        Raises:
            ConfigError: if the parts of the file do not fit together.
            FlashMoAError: if a package for ``embedder = "local"`` is missing.
        """
        engines: dict[tuple[str, str | None], EngineClient] = {}

        async def connect(url: str, api_key: str | None = None) -> EngineClient:
            if (url, api_key) not in engines:
                client = EngineClient(url, api_key=api_key)
                engines[url, api_key] = await stack.enter_async_context(client)
            return engines[url, api_key]

        try:
            layers = [
                [
                    Model(await connect(model.engine, model.api_key), model.model, model.sampling)
                    for model in layer.models
                    for _ in range(model.repeat)
                ]
                for layer in self.layers
            ]
            prompt = AggregationPrompt(self.layout)
            if self.instruction is not None:
                prompt = AggregationPrompt(self.layout, self.instruction)
            early_exit = None
            if (table := self.early_exit) is not None:
                embedder: Embedder
                if table.embedder == "local":
                    embedder = LocalEmbedder()
                else:
                    embedder = EngineEmbedder(await connect(table.embedder))
                early_exit = EarlyExit(embedder, **table.model_dump(exclude={"embedder"}))
            return MixtureOfAgents(layers, self.topology, prompt=prompt, early_exit=early_exit)
        except ValueError as error:
            raise ConfigError(str(error)) from error
