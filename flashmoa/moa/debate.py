"""Let several models answer, read each other's answers and answer again (``Debate``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from flashmoa import Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import Model
from flashmoa.moa.conclusion import Extract
from flashmoa.moa.debate_runs import DebateRun, StaircaseDebateRun, WholeAnswerRun
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.prompts import DebatePrompt, Question, conversation
from flashmoa.moa.results import DebateResult
from flashmoa.moa.sampling import needs_one_request
from flashmoa.moa.settings import Budget, Fallback, Limits, Quorum, Steps, check_quorums
from flashmoa.observe import Listener, contained, ignore


class Debate:
    """Lets debaters answer a question in rounds (Du et al. 2023, arXiv 2305.14325).

    In the first round each debater answers alone. In every later round it reads the answers that
    all debaters gave in the round before. While answers are written, they flow into the prompts of
    the next round. Answers that fail or are empty are left out. Answers that do not fit into a
    reader's context are cut, the longest first. The result's records show both.

    Args:
        debaters: at least two models.
        rounds: how often each debater answers.
        conclusion: a function or a model that concludes from the last round's answers. A function
            returns the ballot of each answer, or ``None``. The most common ballot wins; in a tie,
            that of the first debater. A model reads all answers and writes its own, as the last
            aggregator of a Mixture-of-Agents does.
        prompt: the debaters' prompt.
        staircase: settings with which debaters, and an aggregator, begin when all debaters have
            written a chunk in the round before, and continue chunk by chunk. By default they wait
            for whole answers, and so they do for parameters that need one request
            (:meth:`needs_one_request`).
        ahead: which part of later rounds' prompts is prefilled before their requests; for
            comparisons.
        quorum: how many answers of a round suffice after some time; ``None``: all are waited for.
        limits: how long agents may take whose models do not say it themselves. A debater that takes
            longer is left out of the round.
        budget: what a question may cost; ``None``: anything.
        fallback: what answers if the aggregator fails, or no debater answers in the last round.
        listener: called with every event. Agents are named ``ROUND.PLACE``, from 1.

    Raises: ValueError if there are fewer than two debaters, no round, or a quorum of more debaters.
    """

    def __init__(  # noqa: PLR0913 - all but three have a default
        self,
        debaters: Sequence[Model],
        rounds: int,
        conclusion: Extract | Model,
        *,
        prompt: DebatePrompt | None = None,
        staircase: Steps | None = None,
        ahead: Ahead = "text",
        quorum: Quorum | None = None,
        limits: Limits | None = None,
        budget: Budget | None = None,
        fallback: Fallback | None = None,
        listener: Listener = ignore,
    ) -> None:
        if len(debaters) < 2:
            raise ValueError(f"a debate needs at least two debaters; there are {len(debaters)}")
        if rounds < 1:
            raise ValueError(f"a debate needs at least one round; rounds is {rounds}")
        check_quorums([quorum], [[len(debaters)]])
        self.debaters = debaters
        self.rounds = rounds
        self.conclusion = conclusion
        self.prompt = prompt or DebatePrompt()
        self.staircase = staircase
        self.ahead: Ahead = ahead
        self.quorum = quorum
        self.limits = limits or Limits()
        self.budget = budget
        self.fallback = fallback or Fallback()
        self.listener = contained(listener)

    def needs_one_request(self, sampling: Mapping[str, Any] | None = None) -> list[str]:
        """Return the parameters for which no agent can write its answer on a staircase.

        Args:
            sampling: the request's parameters, as of :meth:`answer`.

        Returns: their names; none without ``staircase``.
        """
        if self.staircase is None:
            return []
        # Debaters of the first round write in one request anyway.
        writers = [] if self.rounds == 1 else [*self.debaters]
        if isinstance(self.conclusion, Model):
            writers.append(self.conclusion.with_sampling(sampling))
        else:
            writers += [writer.with_sampling(sampling) for writer in writers]
        names = (name for writer in writers for name in needs_one_request(writer.sampling))
        return list(dict.fromkeys(names))

    async def answer(
        self, question: Question, sampling: Mapping[str, Any] | None = None
    ) -> DebateResult:
        """Return the debate's answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.
            sampling: parameters of the aggregator, or of the last round's debaters if they vote, in
                place of their models'.

        Raises:
            ValueError: if the last message is not a user's.
            MixtureFailed: if no debater could answer, or the aggregator or the last round could not
                and ``fallback`` has no substitute.
            Exception: if the function ``conclusion`` raises it.
        """
        async with self.answering(question, sampling) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(
        self, question: Question, sampling: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[DebateRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        The arguments and exceptions are those of :meth:`answer`.
        """
        messages = conversation(question)
        flow = Workflow(self.debaters[0].engine, ahead=self.ahead, listener=self.listener)
        async with flow:
            inquiry = Inquiry(flow, self.listener, self.limits, self.budget)
            run: DebateRun
            if self.staircase is None or self.needs_one_request(sampling):
                run = WholeAnswerRun(self, inquiry, messages, sampling)
            else:
                run = StaircaseDebateRun(self, inquiry, messages, sampling, self.staircase)
            try:
                yield run
            finally:
                run.cancel()
