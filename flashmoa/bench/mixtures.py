"""One question answered in several ways: by a model alone, by mixtures, by staircases.

Each way of the tree adds one thing to the way before it (Faster-MoA §5.3), so that they can be
told apart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flashmoa.bench.family.models import AGGREGATOR, SIZES
from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.links import Ahead
from flashmoa.moa import (
    AgentAnswer,
    AggregationPrompt,
    EarlyExit,
    MixtureOfAgents,
    Model,
    Schedule,
    Staircase,
)
from flashmoa.moa.prompts import Layout
from flashmoa.moa.steps import Order
from flashmoa.observe import Event, FirstToken
from flashmoa.workflow import Workflow

Way = Literal[
    "small",
    "medium",
    "large",
    "all-to-all",
    "tree",
    "tree + overlap",
    "undecided",
    "full",
    "one layer",
    "staircase",
    "appended",
    "interleaved",
]
ABOUT: dict[Way, str] = {
    "small": "that model alone, on stock SGLang; medium and large likewise",
    "medium": "",
    "large": "",
    "all-to-all": "nine proposers, nine aggregators, one more; stock SGLang",
    "tree": "nine, three, one, each aggregator with a cluster of its own; stock SGLang",
    "tree + overlap": "the same with the plugin: prompts are prefilled while answers are written",
    "undecided": "early exit that decides and never leaves: what deciding costs",
    "full": "early exit, too",
    "one layer": "three proposers and an aggregator on stock SGLang, to compare staircases with",
    "staircase": "its aggregator writes along; each proposer's text in one piece (contiguous)",
    "appended": "chunks behind each other, round by round (rounds): less is prefilled again",
    "interleaved": "chunks and what was written from them in turns: hardly any is prefilled again",
}
# Over all-to-all, end to end; the maxima of Faster-MoA §5.3.
PAPER: dict[Way, float] = {"tree": 0.38, "tree + overlap": 0.24, "full": 0.10}
# To the first token, over a mixture of one layer (Staircase Streaming, small models).
PAPER_FIRST: dict[Way, float] = {"staircase": 0.044, "appended": 0.042}

_SHAPES: dict[Way, str] = {
    "all-to-all": "9x9x1",
    "tree": "9-3-1",
    "tree + overlap": "9-3-1",
    "undecided": "9-3-1",
    "full": "9-3-1",
    "one layer": "3-1",
}
_ORDERS: dict[Way, Order] = {
    "staircase": "contiguous",
    "appended": "rounds",
    "interleaved": "interleaved",
}
_STOCK: frozenset[Way] = frozenset(("small", "medium", "large", "all-to-all", "tree", "one layer"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A question answered in one way.

    Attributes:
        seconds: from the question to the last token. first_token: to the first one.
        tokens: of the answer.
        computed: prompt tokens of the last aggregator that were prefilled, of those ``late`` the
            ones that were left when its request came. ``prompt_tokens``: as many as there were.
        asked, used: proposers by size, and those of them whose answer was waited for.
        decisions: seconds that each decision about leaving early took. layers: seconds from the
            first request of a layer to its last token, where such decisions were taken.
    """

    text: str
    seconds: float
    first_token: float
    tokens: int
    prompt_tokens: int = 0
    computed: int = 0
    late: int = 0
    asked: Mapping[str, int] = field(default_factory=dict[str, int])
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    decisions: Sequence[float] = ()
    layers: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Contest:
    """What the ways have in common.

    Attributes:
        engines, stock: by size, with the plugin and without.
        models: names by which the engines serve them.
        prompts: of aggregators, by layout. layout: the one that mixtures use.
        schedule: of staircases' chunks.
        proposing, final: sampling parameters of agents that others read, and of the last one.
    """

    engines: Mapping[str, EngineClient]
    stock: Mapping[str, EngineClient]
    models: Mapping[str, str]
    prompts: Callable[[Layout], AggregationPrompt]
    layout: Layout
    schedule: Schedule
    early_exit: EarlyExit
    proposing: Mapping[str, Any]
    final: Mapping[str, Any]

    @property
    def ways(self) -> list[Way]:
        return [way for way in ABOUT if self.stock or way not in _STOCK]

    async def flush(self) -> None:
        """Empty every engine's cache."""
        for engine in (*self.engines.values(), *self.stock.values()):
            await engine.flush_cache()

    async def ask(self, way: Way, question: str) -> Outcome:
        """Raises: MixtureFailed, EngineError."""
        if way in SIZES:
            return await self._alone(way, question)
        if way in _ORDERS:
            return await self._climb(way, question)
        return await self._mix(way, question)

    def _model(self, way: Way, size: str, sampling: Mapping[str, Any]) -> Model:
        engines = self.stock if way in _STOCK else self.engines
        return Model(engines[size], self.models[size], sampling)

    def _proposers(self, way: Way, width: int) -> list[Model]:
        """Small, medium, large in turn, so that every cluster has one of each."""
        return [self._model(way, SIZES[n % 3], self.proposing) for n in range(width)]

    def _early_exit(self, way: Way) -> EarlyExit | None:
        if way == "full":
            return self.early_exit
        if way == "undecided":  # Q stays below 1.
            return replace(self.early_exit, rule="threshold", threshold=1.0)
        return None

    async def _alone(self, size: Way, question: str) -> Outcome:
        model = self._model(size, size, self.final)
        firsts: list[float] = []
        began = time.time()

        def note(event: Event) -> None:
            if isinstance(event, FirstToken):
                firsts.append(event.at)

        async with Workflow(model.engine, ahead="nothing", listener=note) as flow:
            asked = [{"role": "user", "content": question}]
            answer = flow.ask(asked, model=model.model, **model.sampling)
            text = await answer
        ended = time.time()
        tokens = answer.usage.completion_tokens if answer.usage is not None else 0
        return Outcome(text, ended - began, (firsts or [ended])[0] - began, tokens)

    async def _mix(self, way: Way, question: str) -> Outcome:
        shape = _SHAPES[way]
        widths = [int(width) for width in shape.replace("x", "-").split("-")]
        aggregator = self._model(way, AGGREGATOR, self.proposing)
        between = [[aggregator] * width for width in widths[1:-1]]
        ahead: Ahead = "nothing" if way in _STOCK else "text"
        mixture = MixtureOfAgents(
            [self._proposers(way, widths[0]), *between, [self._model(way, AGGREGATOR, self.final)]],
            shape,
            prompt=self.prompts(self.layout),
            early_exit=self._early_exit(way),
            ahead=ahead,
        )
        began = time.time()
        result = await mixture.answer(question)
        ended = time.time()
        proposers = result.layers[0]
        usage = result.final.usage
        return Outcome(
            result.text,
            ended - began,
            (result.final.first_token or ended) - began,
            usage.completion_tokens if usage is not None else 0,
            *_prefilled([usage]),
            Counter(SIZES[agent.place % 3] for agent in proposers),
            Counter(SIZES[agent.place % 3] for agent in proposers if agent.status == "used"),
            [decision.seconds for decision in result.decisions],
            [_span(layer) for layer in result.layers[:-1]] if result.decisions else [],
        )

    async def _climb(self, way: Way, question: str) -> Outcome:
        order = _ORDERS[way]
        staircase = Staircase(
            self._proposers(way, 3),
            self._model(way, AGGREGATOR, self.final),
            prompt=self.prompts(self.layout if order == "contiguous" else "question-first"),
            schedule=self.schedule,
            order=order,
        )
        result = await staircase.answer(question)
        return Outcome(
            result.text,
            result.seconds,
            result.time_to_first_token,
            result.tokens,
            *_prefilled([one.usage for one in result.rounds]),
        )


def _prefilled(usages: Sequence[PromptUsage | None]) -> tuple[int, int, int]:
    """Prompt tokens, those that were prefilled, and those of them that were late."""
    known = [usage for usage in usages if usage is not None]
    late = sum(usage.prompt_tokens - (usage.cached_tokens or 0) for usage in known)
    streamed = sum(usage.streamed_tokens or 0 for usage in known)
    return sum(usage.prompt_tokens for usage in known), streamed + late, late


def _span(layer: Sequence[AgentAnswer]) -> float:
    started = [agent.started for agent in layer if agent.started is not None]
    finished = [agent.finished for agent in layer if agent.finished is not None]
    return max(finished) - min(started) if started and finished else 0.0
