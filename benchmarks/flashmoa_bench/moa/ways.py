"""Answer one question in several ways: by a model alone, by mixtures, by staircases.

Each way of the tree adds one technique to the way before it (Faster-MoA §5.3), so that each one's
effect can be seen.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flashmoa.engine import EngineClient
from flashmoa.linking.link import Ahead
from flashmoa.moa import (
    AggregationPrompt,
    EarlyExit,
    MixtureOfAgents,
    Model,
    Schedule,
    Staircase,
)
from flashmoa.moa.prompts import Layout
from flashmoa.moa.settings import Order
from flashmoa.observe import Event, FirstToken, both
from flashmoa.workflow import Workflow
from flashmoa_bench.family import AGGREGATOR, SIZES
from flashmoa_bench.harness import clock
from flashmoa_bench.moa.prompt_tokens import PromptListener, PromptTokens

MixtureWay = Literal[
    "small",
    "medium",
    "large",
    "all-to-all",
    "tree",
    "tree + overlap",
    "undecided",
    "full",
    "as published",
    "one layer",
    "staircase",
    "appended",
]
WAYS: dict[MixtureWay, str] = {
    "small": "that model alone, on stock SGLang; medium and large likewise",
    "medium": "",
    "large": "",
    "all-to-all": "nine proposers, nine aggregators, one more; stock SGLang",
    "tree": "nine, three, one, each aggregator with a cluster of its own; stock SGLang",
    "tree + overlap": "the same with the plugin: prompts are prefilled while answers are written",
    "undecided": "early exit that decides and never leaves: what deciding costs",
    "full": "early exit, too: by the options of the command line",
    "as published": "early exit by Algorithm 1 to the letter: one answer may suffice",
    "one layer": "three proposers and an aggregator on stock SGLang, to compare staircases with",
    "staircase": "its aggregator writes along; each proposer's text in one piece (contiguous)",
    "appended": "chunks after each other, round by round (rounds): less is prefilled again",
}
# The paper's latency over that of all-to-all. Faster-MoA (arXiv 2512.18126) §5.3 reports reductions
# of at most some 62, 76 and 90 %, on six H200; "fully integrated" has Algorithm 1's early exit.
PAPER: dict[MixtureWay, float] = {"tree": 0.38, "tree + overlap": 0.24, "as published": 0.10}
# The time to the first token over that of waiting for whole answers. The abstract of Staircase
# Streaming (arXiv 2510.05059) reports a reduction of up to 93 %.
PAPER_FIRST: dict[MixtureWay, float] = {"staircase": 0.07}

_SHAPES: dict[MixtureWay, str] = {
    "all-to-all": "9x9x1",
    "tree": "9-3-1",
    "tree + overlap": "9-3-1",
    "undecided": "9-3-1",
    "full": "9-3-1",
    "as published": "9-3-1",
    "one layer": "3-1",
}
_ORDERS: dict[MixtureWay, Order] = {
    "staircase": "contiguous",
    "appended": "rounds",
}
_STOCK: frozenset[MixtureWay] = frozenset(
    ("small", "medium", "large", "all-to-all", "tree", "one layer")
)


@dataclass(frozen=True, slots=True)
class MixtureOutcome:
    """The answer to a question in one way, and its figures.

    Attributes:
        seconds, first_token: time from the question to the last and to the first token.
        tokens: number of tokens that the last agent wrote.
        dropped_words: number of its words that were not shown, because they repeated the end of the
            text before them.
        prompts: how each agent's prompts were computed, by ``LAYER.PLACE``, both counted from 1.
        asked, used: number of proposers, and of those whose answer was waited for, by size.
        decisions: seconds of each decision about leaving early, with all waiting.
        deciding: seconds by which the decisions delayed the answer (see MixtureResult); ``None``
            without early exit.
    """

    text: str
    seconds: float
    first_token: float
    tokens: int
    prompts: Mapping[str, PromptTokens] = field(default_factory=dict[str, PromptTokens])
    dropped_words: int = 0
    asked: Mapping[str, int] = field(default_factory=dict[str, int])
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    decisions: Sequence[float] = ()
    deciding: float | None = None


@dataclass(frozen=True, slots=True)
class MixtureSetup:
    """Answers questions in all ways, with the same engines, prompts and parameters.

    Attributes:
        engines, stock: engines with the plugin and without, by size.
        models: names by which the engines serve their models, by size.
        reporting: URLs of the engines that run with ``--enable-cache-report``.
        prompts: returns the aggregators' prompt for a layout.
        layout, schedule: layout of mixtures' prompts, and sizes of staircases' chunks.
        proposing, final: sampling parameters of agents that others read, and of the last agent.
    """

    engines: Mapping[str, EngineClient]
    stock: Mapping[str, EngineClient]
    models: Mapping[str, str]
    reporting: Collection[str]
    prompts: Callable[[Layout], AggregationPrompt]
    layout: Layout
    schedule: Schedule
    early_exit: EarlyExit
    proposing: Mapping[str, Any]
    final: Mapping[str, Any]

    @property
    def ways(self) -> list[MixtureWay]:
        return [way for way in WAYS if self.stock or way not in _STOCK]

    async def flush(self) -> None:
        """Empty every engine's cache."""
        for engine in (*self.engines.values(), *self.stock.values()):
            await engine.flush_cache()

    async def ask(self, way: MixtureWay, question: str) -> MixtureOutcome:
        """Answer a question in one way.

        Raises: MixtureFailed if a mixture has no answer; EngineError if an engine fails a model
            that is asked alone.
        """
        if way in SIZES:
            return await self._ask_model(way, question)
        if way in _ORDERS:
            return await self._ask_staircase(way, question)
        return await self._ask_mixture(way, question)

    def _model(self, way: MixtureWay, size: str, sampling: Mapping[str, Any]) -> Model:
        engines = self.stock if way in _STOCK else self.engines
        return Model(engines[size], self.models[size], sampling)

    def _proposers(self, way: MixtureWay, width: int) -> list[Model]:
        """Return small, medium and large models in turn, so that every cluster has one of each."""
        return [self._model(way, SIZES[n % 3], self.proposing) for n in range(width)]

    async def _ask_model(self, size: MixtureWay, question: str) -> MixtureOutcome:
        model = self._model(size, size, self.final)
        prompts = PromptListener(self.reporting)
        first_tokens: list[float] = []
        began = time.time()

        def note_first_token(event: Event) -> None:
            if isinstance(event, FirstToken):
                first_tokens.append(event.at)

        listener = both(note_first_token, prompts)
        async with Workflow(model.engine, ahead="nothing", listener=listener) as flow:
            messages = [{"role": "user", "content": question}]
            answer = flow.ask(messages, model=model.model, name="1.1", **model.sampling)
            text = await answer
        ended = time.time()
        tokens = answer.usage.completion_tokens if answer.usage is not None else 0
        first = (first_tokens or [ended])[0] - began
        seconds = clock.seconds_of(ended - began)
        return MixtureOutcome(text, seconds, clock.seconds_of(first), tokens, prompts.by_agent)

    async def _ask_mixture(self, way: MixtureWay, question: str) -> MixtureOutcome:
        shape = _SHAPES[way]
        widths = [int(width) for width in shape.replace("x", "-").split("-")]
        aggregator = self._model(way, AGGREGATOR, self.proposing)
        between = [[aggregator] * width for width in widths[1:-1]]
        ahead: Ahead = "nothing" if way in _STOCK else "text"
        prompts = PromptListener(self.reporting)
        early_exit = choose_early_exit(way, self.early_exit, question)
        mixture = MixtureOfAgents(
            [self._proposers(way, widths[0]), *between, [self._model(way, AGGREGATOR, self.final)]],
            shape,
            prompt=self.prompts(self.layout),
            early_exit=early_exit,
            ahead=ahead,
            listener=prompts,
        )
        began = time.time()
        result = await mixture.answer(question)
        ended = time.time()
        proposers = result.layers[0]
        usage = result.final.usage
        return MixtureOutcome(
            result.text,
            clock.seconds_of(ended - began),
            clock.seconds_of((result.final.first_token or ended) - began),
            usage.completion_tokens if usage is not None else 0,
            prompts.by_agent,
            asked=Counter(SIZES[agent.place % 3] for agent in proposers),
            used=Counter(SIZES[agent.place % 3] for agent in proposers if agent.status == "used"),
            decisions=[clock.seconds_of(decision.seconds) for decision in result.decisions],
            deciding=clock.seconds_of(result.deciding) if early_exit is not None else None,
        )

    async def _ask_staircase(self, way: MixtureWay, question: str) -> MixtureOutcome:
        order = _ORDERS[way]
        prompts = PromptListener(self.reporting)
        staircase = Staircase(
            self._proposers(way, 3),
            self._model(way, AGGREGATOR, self.final),
            prompt=self.prompts(self.layout if order == "contiguous" else "question-first"),
            schedule=self.schedule,
            order=order,
            listener=prompts,
        )
        result = await staircase.answer(question)
        return MixtureOutcome(
            result.text,
            clock.seconds_of(result.seconds),
            clock.seconds_of(result.time_to_first_token),
            result.tokens,
            prompts.by_agent,
            result.dropped_words,
        )


def choose_early_exit(way: MixtureWay, policy: EarlyExit, question: str) -> EarlyExit | None:
    """Return the policy by which a way leaves early; ``None`` if it does not.

    Args:
        policy: policy of the command line.
    """
    # Each question gets a different seed, so that they do not all draw the same random numbers.
    policy = replace(policy, seed=policy.seed + zlib.crc32(question.encode()))
    if way == "full":
        return policy
    if way == "as published":
        return EarlyExit.as_published(policy.embedder, policy.seed)
    if way == "undecided":  # Q stays below 1, so that this never leaves.
        return replace(policy, rule="threshold", threshold=1.0)
    return None
