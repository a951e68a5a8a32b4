"""One question on a staircase: its proposers, and the aggregator that writes along with them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from flashmoa.moa.agents import explained
from flashmoa.moa.answers import Round
from flashmoa.moa.chunks import cut_all
from flashmoa.moa.climber import Climber
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.steps import Steps
from flashmoa.moa.view import View
from flashmoa.observe import Listener
from flashmoa.workflow import Answer, Workflow


@dataclass(slots=True)
class StaircaseResult:
    """The answer, the proposers' answers, and the rounds.

    Attributes:
        time_to_first_token: from the question to the answer's first token, seconds.
        seconds: to its last one.
        tokens: that the aggregator wrote, also those that were dropped.
    """

    text: str
    proposals: list[str]
    rounds: list[Round] = field(default_factory=list[Round])
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def dropped_words(self) -> int:
        """Words that were left out, as they repeated the end of what was there."""
        return sum(len(done.dropped.split()) for done in self.rounds)


class Plan(Protocol):
    """What a staircase is made of."""

    proposers: Sequence[Model]
    aggregator: Model
    prompt: AggregationPrompt
    steps: Steps
    listener: Listener


class Climb:
    """A question being answered; ``async for`` gives the pieces of the answer, once."""

    def __init__(self, plan: Plan, flow: Workflow, question: list[dict[str, Any]]) -> None:
        self._began = time.time()
        self._ended: float | None = None
        self._plan = plan
        self._flow = flow
        self._proposals = [
            self._propose(number, model, question) for number, model in enumerate(plan.proposers, 1)
        ]
        view = View(plan.prompt, question, cut_all(flow, self._proposals, plan.prompt, plan.steps))
        self._climber = Climber(
            "2.1", plan.aggregator, view, steps=plan.steps, flow=flow, listener=plan.listener
        )
        self._pieces = self._climb()

    @property
    def result(self) -> StaircaseResult:
        """What there is of it."""
        climber, began = self._climber, self._began
        return StaircaseResult(
            climber.text,
            [answer.written for answer in self._proposals],
            climber.rounds,
            (climber.first_token or began) - began,
            (self._ended or time.time()) - began,
            climber.tokens,
        )

    def cancel(self) -> None:
        """Have every proposer stop; harmless for those that have."""
        for answer in self._proposals:
            answer.cancel()

    def __aiter__(self) -> AsyncGenerator[str]:
        """Raises: MixtureFailed."""
        return self._pieces

    async def aclose(self) -> None:
        """End the aggregator's request, if one is under way."""
        with anyio.CancelScope(shield=True):
            await self._pieces.aclose()
            await self._climber.aclose()

    def _propose(self, number: int, model: Model, question: list[dict[str, Any]]) -> Answer:
        parameters: dict[str, Any] = {"model": model.model, **model.sampling}
        return self._flow.ask(question, engine=model.engine, name=f"1.{number}", **parameters)

    async def _climb(self) -> AsyncGenerator[str]:
        with explained("the aggregator"):
            async with aclosing(aiter(self._climber)) as pieces:
                async for piece in pieces:
                    yield piece
        self._ended = time.time()
