"""Build the mixture, staircase or debate that a TOML file describes (``build_system``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from flashmoa import EngineClient
from flashmoa.moa.debate import Debate
from flashmoa.moa.early_exit import EarlyExit, EngineEmbedder
from flashmoa.moa.mixture import MixtureOfAgents, Staircase
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.prompts import AggregationPrompt, DebatePrompt
from flashmoa.moa.run import System
from flashmoa.moa.settings import Quorum, check_quorums
from flashmoa.moa.topology import Topology

if TYPE_CHECKING:
    from flashmoa.moa.config import MixtureConfig, ModelConfig

# The tables that only some kinds have, and the kinds that have them.
_TABLES = {
    "topology": ("mixture",),
    "early_exit": ("mixture",),
    "staircase": ("staircase", "debate"),
    "debate": ("debate",),
}


def check_parts(config: MixtureConfig) -> None:
    """Check that a file has the parts of its kind and no others. Raises: ValueError if not."""
    kind, given = config.kind, config.model_fields_set
    for table, kinds in _TABLES.items():
        if table in given and kind not in kinds:
            raise ValueError(f"{table} is set, but a {kind} has none; remove it, or change kind")
    votes = kind == "debate" and config.debate.ballot is not None
    count = len(config.layers)
    if kind == "mixture" and count < 2:
        raise ValueError(
            f"there is {count} layer; a mixture needs at least two, the proposers' and an "
            "aggregator's"
        )
    if kind != "mixture" and count != (1 if votes else 2):
        wanted = "one layer, the debaters" if votes else "two layers, and one agent in the second"
        raise ValueError(f"there are {count} layers; this {kind} needs {wanted}")
    widths = [sum(model.repeat for model in layer.models) for layer in config.layers]
    if not votes and widths[-1] != 1:
        raise ValueError(
            f"the last layer has {widths[-1]} agents; it must have one, the aggregator"
        )
    sizes = [widths[:1]]
    if kind == "mixture":
        layers = Topology.of(widths, config.topology).layers[1:]
        sizes = [[len(reads) for reads in layer] for layer in layers]
    check_quorums(_quorums(config, len(sizes)), sizes)
    if any(layer.quorum is not None for layer in config.layers[len(sizes) :]):
        raise ValueError("the last layer has a quorum, but no agent reads its answers; remove it")
    if kind == "debate" and widths[0] < 2:
        raise ValueError(f"the first layer has {widths[0]} agent; a debate needs at least two")
    _check_effects(config, max(size for layer in sizes for size in layer), votes=votes)


def _check_effects(config: MixtureConfig, largest: int, *, votes: bool) -> None:
    """Check that keys change something. Raises: ValueError if one cannot.

    Args: largest: how many answers are read together at most.
    """
    # Only an aggregator has such a prompt, and the first layer has none.
    readers = [] if votes else config.layers[1:]
    unread = [layer for layer in config.layers if layer not in readers]
    given = [*([config.given()] if votes else []), *(layer.given() for layer in unread)]
    if names := [name for keys in given for name in keys]:
        where = "this debate ends with a vote" if votes else "agents of the first layer read none"
        raise ValueError(f"{names[0]} is about a prompt with answers, but {where}; remove it")
    if config.overlaps and "memory" in config.debate.model_fields_set:
        raise ValueError(
            "debate.memory is set, but with a staircase debaters read the round before only; "
            "remove one of them"
        )
    least = config.early_exit.least_answers if config.early_exit is not None else 0
    if least >= largest:
        raise ValueError(
            f"early exit needs {least} complete answers, but at most {largest} are read together, "
            "so that none is ever left out; give a smaller min_answers, or remove early_exit"
        )


def _quorums(config: MixtureConfig, layers: int) -> list[Quorum | None]:
    """Return the quorums of the first layers."""
    return [layer.quorum or config.quorum for layer in config.layers[:layers]]


async def build_system(config: MixtureConfig, stack: AsyncExitStack) -> System:
    """Build what a file describes.

    Args:
        stack: closes the clients of its engines.

    Raises:
        ValueError: if the parts of the file do not fit together.
    """
    check_parts(config)
    builder = _Builder(config, stack)
    layers = [await builder.connect_models(layer.models) for layer in config.layers]
    fallback = Fallback(
        await builder.connect_models(config.fallback.models), config.fallback.best_answer
    )
    shared: dict[str, Any] = {"limits": config.limits, "budget": config.budget}
    if config.kind == "mixture":
        return MixtureOfAgents(
            layers,
            config.topology,
            prompt=[builder.prompt(number) for number in range(1, len(layers))],
            early_exit=await builder.early_exit(),
            quorum=_quorums(config, len(layers) - 1),
            fallback=fallback,
            **shared,
        )
    shared |= {"quorum": _quorums(config, 1)[0], "fallback": fallback}
    if config.kind == "debate":
        return builder.debate(layers, shared)
    return Staircase(
        layers[0],
        layers[1][0],
        prompt=builder.prompt(1, layout="question-first"),
        steps=config.staircase,
        **shared,
    )


class _Builder:
    """Builds the parts of a system, with one client for each engine and key."""

    def __init__(self, config: MixtureConfig, stack: AsyncExitStack) -> None:
        self._config = config
        self._stack = stack
        self._engines: dict[tuple[str, str | None], EngineClient] = {}

    async def connect(self, url: str, api_key: str | None = None) -> EngineClient:
        """Return the client of an engine."""
        if (url, api_key) not in self._engines:
            client = EngineClient(url, api_key=api_key)
            self._engines[url, api_key] = await self._stack.enter_async_context(client)
        return self._engines[url, api_key]

    async def connect_models(self, models: Sequence[ModelConfig]) -> list[Model]:
        """Return an agent's model for each agent. Their engines take turns at being the first."""
        result: list[Model] = []
        for model in models:
            engines = [await self.connect(url, model.api_key) for url in model.urls]
            for number in range(model.repeat):
                first = number % len(engines)
                result.append(
                    Model(
                        engines[first],
                        model.model,
                        model.sampling,
                        backups=[*engines[first + 1 :], *engines[:first]],
                        limits=model.limits,
                        role=model.role,
                    )
                )
        return result

    def prompt(self, layer: int, **defaults: Any) -> AggregationPrompt:
        """Return the prompt of a layer, by its number from 0."""
        given = {**defaults, **self._config.given(), **self._config.layers[layer].given()}
        return AggregationPrompt(**given)

    async def early_exit(self) -> EarlyExit | None:
        """Return the policy of early exit, if the file has one."""
        table = self._config.early_exit
        if table is None:
            return None
        engine = await self.connect(table.embedder, table.api_key)
        return table.build(EngineEmbedder(engine, table.model))

    def debate(self, layers: Sequence[Sequence[Model]], shared: dict[str, Any]) -> Debate:
        """Return the debate of the first layer's models."""
        table = self._config.debate
        prompt = DebatePrompt(memory=table.memory)
        if table.ballot is None:
            aggregation = self.prompt(1, layout="question-first")
            prompt = DebatePrompt(memory=table.memory, aggregation=aggregation)
        return Debate(
            layers[0],
            table.rounds,
            table.extract if table.ballot is not None else layers[1][0],
            prompt=prompt,
            staircase=self._config.staircase if self._config.overlaps else None,
            **shared,
        )
