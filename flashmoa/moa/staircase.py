"""Let an aggregator answer in rounds while its proposers write (``Staircase``, arXiv 2510.05059).

In each round, the next chunk of every proposer's answer is added to the aggregator's prompt, and
the aggregator writes a part of its own answer from the chunks so far. Its first token waits for
the proposers' first chunks, and not for their whole answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from flashmoa import Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import CallTimes, Model, raise_as_mixture_failed
from flashmoa.moa.chunks import Schedule, Steps
from flashmoa.moa.layers import StaircaseLayers
from flashmoa.moa.prompts import AggregationPrompt, Messages, Order, Question, conversation
from flashmoa.moa.results import StaircaseResult
from flashmoa.observe import Listener, both, contained, ignore


class Staircase:
    """Runs a layer of proposers, and an aggregator that writes while they do.

    Args:
        prompt: the aggregator's prompt. With an order other than ``contiguous`` its layout should
            be ``question-first``, the default, since only the end of a prompt can grow.
        schedule, order, drop_repeats: see :class:`Steps`.
        ahead: which part of the aggregator's prompts is prefilled before its requests.
        listener: called with every event.

    Raises: ValueError if there are no proposers.
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
            ValueError: if the last message is not a user's.
            MixtureFailed: if no proposer could answer, or the aggregator could not.
        """
        async with self.answering(question) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[StaircaseRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        Raises: as :meth:`answer`.
        """
        times = CallTimes()
        listener = both(self.listener, times)
        async with Workflow(self.aggregator.engine, ahead=self.ahead, listener=listener) as flow:
            run = StaircaseRun(self, flow, conversation(question), times)
            try:
                yield run
            finally:
                run.cancel()


class StaircaseRun:
    """Answers one question on a staircase; ``async for`` yields the pieces of the answer."""

    def __init__(
        self, staircase: Staircase, flow: Workflow, question: Messages, times: CallTimes
    ) -> None:
        self._started = time.time()
        self._layers = StaircaseLayers(
            flow,
            question,
            staircase.proposers,
            staircase.steps,
            times=times,
            listener=staircase.listener,
        )
        [self._writer] = self._layers.add([staircase.prompt], [staircase.aggregator])

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the aggregator's answer. Raises: as :meth:`result`."""
        with raise_as_mixture_failed("the aggregator"):
            async for piece in self._writer.answer:
                yield piece

    async def result(self) -> StaircaseResult:
        """Return the result when the answer is complete.

        Raises: MixtureFailed if no proposer could answer, or the aggregator could not.
        """
        with raise_as_mixture_failed("the aggregator"):
            await self._writer.answer
        return self.partial_result

    @property
    def partial_result(self) -> StaircaseResult:
        """Return the result with the part of the answer that is written."""
        writer, started = self._writer, self._started
        finished = writer.rounds[-1].finished if writer.answer.is_over and writer.rounds else None
        return StaircaseResult(
            writer.answer.written,
            [proposal.written for proposal in self._layers.answers[0]],
            writer.rounds,
            (writer.first_token or started) - started,
            (finished or time.time()) - started,
            writer.tokens,
        )

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self._layers.cancel()
