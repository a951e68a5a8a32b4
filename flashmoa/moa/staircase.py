"""Staircase streaming: the aggregator begins when every proposer has written a few words.

In rounds: each proposer's next chunk goes to the aggregator, which writes a chunk of its own
answer from what has arrived and waits for the next ones (Staircase Streaming, arXiv 2510.05059).
So its first token waits for the proposers' first chunks and not for their whole answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from flashmoa import Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import Model, raise_as_mixture_failed
from flashmoa.moa.chunks import Schedule, Steps
from flashmoa.moa.layers import StaircaseLayers
from flashmoa.moa.prompts import AggregationPrompt, Messages, Order, Question, conversation
from flashmoa.moa.results import StaircaseResult
from flashmoa.observe import Listener, contained, ignore


class Staircase:
    """A layer of proposers and an aggregator that writes along with them.

    Args:
        prompt: the aggregator's. With an order other than ``contiguous`` its layout should be
            ``question-first``, the default, since only what stands at the end can grow.
        schedule, order, drop_repeats: as in :class:`Steps`.
        ahead: what of the aggregator's prompts is prefilled before its requests.
        listener: is called with every event.

    Raises: ValueError without proposers.
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
            raise ValueError("a staircase needs at least one proposer; there is none")
        self.proposers = proposers
        self.aggregator = aggregator
        self.prompt = prompt or AggregationPrompt("question-first")
        self.steps = Steps(schedule or Schedule(), order, drop_repeats)
        self.ahead: Ahead = ahead
        self.listener = contained(listener)

    async def answer(self, question: Question) -> StaircaseResult:
        """Return the answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.

        Raises:
            ValueError: the last message is not a user's.
            MixtureFailed: no proposer could answer, or the aggregator could not.
        """
        async with self.answering(question) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[StaircaseRun]:
        """Give the answer as it is written; leaving the context ends every agent that writes.

        Raises: as :meth:`answer`.
        """
        engine = self.aggregator.engine
        async with Workflow(engine, ahead=self.ahead, listener=self.listener) as flow:
            run = StaircaseRun(self, flow, conversation(question))
            try:
                yield run
            finally:
                run.cancel()


class StaircaseRun:
    """One question on a staircase; ``async for`` yields the pieces of the answer."""

    def __init__(self, staircase: Staircase, flow: Workflow, question: Messages) -> None:
        self._began = time.time()
        self._layers = StaircaseLayers(
            flow, question, staircase.proposers, staircase.steps, listener=staircase.listener
        )
        [self._writer] = self._layers.add([staircase.prompt], [staircase.aggregator])

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the aggregator's answer. Raises: MixtureFailed."""
        with raise_as_mixture_failed("the aggregator"):
            async for piece in self._writer.answer:
                yield piece

    async def result(self) -> StaircaseResult:
        """Return the result when the answer is complete. Raises: MixtureFailed."""
        with raise_as_mixture_failed("the aggregator"):
            await self._writer.answer
        return self.partial_result

    @property
    def partial_result(self) -> StaircaseResult:
        """Return the result as far as it is written."""
        writer, began = self._writer, self._began
        ended = writer.rounds[-1].finished if writer.answer.is_over and writer.rounds else None
        return StaircaseResult(
            writer.answer.written,
            [proposal.written for proposal in self._layers.answers[0]],
            writer.rounds,
            (writer.first_token or began) - began,
            (ended or time.time()) - began,
            writer.tokens,
        )

    def cancel(self) -> None:
        """Stop every agent; does nothing to those that have finished."""
        self._layers.cancel()
