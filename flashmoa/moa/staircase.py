"""Staircase streaming: the aggregator begins when every proposer has written a few words.

In rounds: each proposer's next chunk goes to the aggregator, which writes a chunk of its own answer
from what has arrived and waits for the next ones (Staircase Streaming, arXiv 2510.05059). So the
time to its first token is that of the proposers' first chunks and not of their whole answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from flashmoa.linking.link import Ahead
from flashmoa.moa.climb import Climb, StaircaseResult
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt, Question, conversation
from flashmoa.moa.steps import Order, Schedule, Steps
from flashmoa.observe import Listener, contained, ignore
from flashmoa.workflow import Workflow


class Staircase:
    """A layer of proposers and an aggregator that writes along with them.

    Args:
        prompt: what the aggregator is told; ``question-first`` is taken where order is not
            ``contiguous``, since only what stands at the end can grow.
        schedule, order, drop_repeats: as in :class:`Steps`.
        ahead: of the aggregator's prompts, what is prefilled before its requests.
        listener: is told everything that happens.
    """

    def __init__(  # noqa: PLR0913 - all but the models have a default
        self,
        proposers: Sequence[Model],
        aggregator: Model,
        *,
        prompt: AggregationPrompt | None = None,
        schedule: Schedule | None = None,
        order: Order = "rounds",
        drop_repeats: bool = True,
        ahead: Ahead = "text",
        listener: Listener = ignore,
    ) -> None:
        if not proposers:
            raise ValueError("a staircase needs at least one proposer")
        self.proposers = proposers
        self.aggregator = aggregator
        self.prompt = prompt or AggregationPrompt("question-first")
        self.steps = Steps(schedule or Schedule(), order, drop_repeats)
        self.ahead: Ahead = ahead
        self.listener = contained(listener)

    async def answer(self, question: Question) -> StaircaseResult:
        """Raises: ValueError, MixtureFailed."""
        async with self.answering(question) as climb:
            async for _ in climb:
                pass
            return climb.result

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[Climb]:
        """The answer as it is written: iterate over it; leaving the context ends all agents.

        Raises: as :meth:`answer`.
        """
        engine = self.aggregator.engine
        async with Workflow(engine, ahead=self.ahead, listener=self.listener) as flow:
            climb = Climb(self, flow, conversation(question))
            try:
                yield climb
            finally:
                climb.cancel()
                await climb.aclose()
