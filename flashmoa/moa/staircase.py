"""Let an aggregator answer in rounds while its proposers write (``Staircase``, arXiv 2510.05059).

In each round, the next chunk of every proposer's answer is added to the aggregator's prompt, and
the aggregator writes a part of its own answer from the chunks so far. Its first token waits for
the proposers' first chunks, and not for their whole answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from flashmoa import Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import Model, raise_as_mixture_failed
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.conclusion import Conclusion
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.layers import AgentLayers
from flashmoa.moa.mixture import MixtureOfAgents, MixtureRun
from flashmoa.moa.prompts import AggregationPrompt, Messages, Question, conversation
from flashmoa.moa.results import AgentAnswer, StaircaseResult
from flashmoa.moa.sampling import needs_one_request
from flashmoa.moa.settings import Budget, Fallback, Limits, Quorum, Steps
from flashmoa.moa.staircase_layers import StaircaseLayers
from flashmoa.observe import Listener, contained, ignore


class Staircase:
    """Runs a layer of proposers, and an aggregator that writes while they do.

    Args:
        aggregator: if it has parameters that one request must follow to the answer's end, or gets
            them with a question, it waits for whole answers and writes in one request
            (``in_one_request_for`` of the result).
        prompt: the aggregator's prompt. With the order ``rounds`` its layout should be
            ``question-first``, the default, since only the end of a prompt can grow.
        steps: the chunks in which it reads, and their order in its prompt.
        quorum: how many proposers suffice after some time: to begin with, and in the end.
        limits, budget, fallback: see :class:`MixtureOfAgents`. Other aggregators wait for the
            proposers' whole answers.
        ahead: which part of the aggregator's prompts is prefilled before its requests.
        listener: called with every event.

    Raises: ValueError if there are no proposers, or fewer than the quorum needs.
    """

    def __init__(  # noqa: PLR0913 - all but the models have a default
        self,
        proposers: Sequence[Model],
        aggregator: Model,
        *,
        prompt: AggregationPrompt | None = None,
        steps: Steps | None = None,
        quorum: Quorum | None = None,
        limits: Limits | None = None,
        budget: Budget | None = None,
        fallback: Fallback | None = None,
        ahead: Ahead = "text",
        listener: Listener = ignore,
    ) -> None:
        if not proposers:
            raise ValueError("a staircase needs at least one proposer; there is none")
        self.proposers = proposers
        self.aggregator = aggregator
        self.prompt = prompt or AggregationPrompt("question-first")
        self.steps = steps or Steps()
        self.quorum = quorum
        self.limits = limits or Limits()
        self.budget = budget
        self.fallback = fallback or Fallback()
        # For answers that must be written in one request.
        self.mixture = MixtureOfAgents(
            [proposers, [aggregator]], prompt=self.prompt, quorum=quorum, fallback=self.fallback
        )
        self.ahead: Ahead = ahead
        self.listener = contained(listener)

    async def answer(
        self, question: Question, sampling: Mapping[str, Any] | None = None
    ) -> StaircaseResult:
        """Return the answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.
            sampling: parameters of the aggregator in place of its model's.

        Raises:
            ValueError: if the last message is not a user's.
            MixtureFailed: if no agent could answer, or the aggregator could not and ``fallback``
                has no substitute.
        """
        async with self.answering(question, sampling) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(
        self, question: Question, sampling: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[StaircaseRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        The arguments and exceptions are those of :meth:`answer`.
        """
        messages = conversation(question)
        flow = Workflow(self.aggregator.engine, ahead=self.ahead, listener=self.listener)
        async with flow:
            inquiry = Inquiry(flow, self.listener, self.limits, self.budget)
            run = StaircaseRun(self, inquiry, messages, sampling)
            try:
                yield run
            finally:
                run.cancel()


class StaircaseRun:
    """Answers one question on a staircase; ``async for`` yields the pieces of the answer."""

    def __init__(
        self,
        staircase: Staircase,
        inquiry: Inquiry,
        question: Messages,
        sampling: Mapping[str, Any] | None,
    ) -> None:
        self._started = time.time()
        self.inquiry = inquiry
        aggregator = staircase.aggregator.with_sampling(sampling)
        self._in_one_request_for = needs_one_request(aggregator.sampling)
        self._agents: AgentLayers | StaircaseLayers
        if self._in_one_request_for:
            run = MixtureRun(staircase.mixture, inquiry, question, sampling)
            self._agents, self._conclusion = run.agents, run.conclusion
        else:
            self._agents, self._conclusion = _begin_staircase(
                staircase, inquiry, question, sampling, aggregator
            )

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the aggregator's answer. Raises: as :meth:`result`."""
        with raise_as_mixture_failed("the aggregator"):
            async for piece in self._conclusion.text:
                yield piece

    async def result(self) -> StaircaseResult:
        """Return the result when the answer is complete.

        Raises: MixtureFailed as :meth:`Staircase.answer`.
        """
        with raise_as_mixture_failed("the aggregator"):
            await self._conclusion.text
        return self.partial_result

    @property
    def partial_result(self) -> StaircaseResult:
        """Return the result with the part of the answer that is written."""
        started, conclusion = self._started, self._conclusion
        proposers, [writer, *others] = self._agents.records()
        return StaircaseResult(
            conclusion.result or conclusion.text.written,
            [proposal.text for proposal in proposers],
            writer.steps,
            (conclusion.first_token or started) - started,
            (conclusion.finished or time.time()) - started,
            writer.usage.completion_tokens if writer.usage is not None else 0,
            conclusion.finish_reason,
            [*proposers, writer, *others],
            self.inquiry.spending(),
            conclusion.substitution,
            self._in_one_request_for,
        )

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self._conclusion.cancel()
        self._agents.cancel()


def _begin_staircase(
    staircase: Staircase,
    inquiry: Inquiry,
    question: Messages,
    sampling: Mapping[str, Any] | None,
    aggregator: Model,
) -> tuple[StaircaseLayers, Conclusion]:
    """Start the agents, and return them with what writes the answer."""
    layers = StaircaseLayers(
        inquiry, question, staircase.proposers, staircase.steps, quorum=staircase.quorum
    )
    [writer] = layers.add([staircase.prompt], [aggregator], is_last=True)

    async def wait_for_answers() -> list[list[AgentAnswer]]:
        await layers.wait(1)
        return layers.records()[:1]

    async def ask(model: Model, answers: Sequence[AgentAnswer], written: str) -> AgentCall:
        model = model.with_sampling(sampling)
        return await layers.ask_another(staircase.prompt, model, answers, written)

    conclusion = Conclusion(staircase.fallback, aggregator, wait_for_answers, ask, sampling)
    inquiry.flow.start_soon(partial(conclusion.run, writer.answer, writer.finish_reason))
    return layers, conclusion
