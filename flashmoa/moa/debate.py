"""Multi-agent debate: several models answer, read each other's answers, and answer anew."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import Times
from flashmoa.moa.answers import DebateResult
from flashmoa.moa.debate_climb import DebateClimb
from flashmoa.moa.debate_prompt import DebatePrompt
from flashmoa.moa.debating import Debating
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import Question, conversation
from flashmoa.moa.steps import Steps
from flashmoa.moa.vote import Extract
from flashmoa.observe import Listener, both, contained, ignore
from flashmoa.workflow import Workflow


class Debate:
    """Debaters who answer a question in rounds (Du et al. 2023, arXiv 2305.14325).

    In the first round each answers alone, in every later one each reads what all of them said
    in the round before. While they write, their answers flow into the prompts of the next
    round. Answers that fail or are empty are left out; answers for which there is no room are
    cut, the longest first. Both is said in the result.

    Args:
        debaters: at least two.
        rounds: how often each answers.
        conclusion: how the last round's answers become one. A function is told each of them and
            says what it comes to, or ``None``; what most come to is the debate's answer, and
            where it is a tie, that of the first debater. A model is told all of them and writes
            one of its own, as the last aggregator of a Mixture-of-Agents.
        prompt: what debaters are told.
        staircase: has them begin when all have written a chunk in the round before, and go on
            chunk by chunk; an aggregator, too. By default they wait for whole answers.
        ahead: of later rounds' prompts, what is prefilled before their requests; to compare with.
        stall_seconds: a debater that pauses for so long, once it has begun, is left out of the
            round.
        listener: is told everything that happens; agents are called ``ROUND.PLACE``, from 1.

    Raises: ValueError where that is no debate.
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
        stall_seconds: float = 60.0,
        listener: Listener = ignore,
    ) -> None:
        if len(debaters) < 2 or rounds < 1:
            raise ValueError("a debate needs at least two debaters and one round")
        self.debaters = debaters
        self.rounds = rounds
        self.conclusion = conclusion
        self.prompt = prompt or DebatePrompt()
        self.staircase = staircase
        self.ahead: Ahead = ahead
        self.stall_seconds = stall_seconds
        self.listener = contained(listener)

    async def answer(self, question: Question) -> DebateResult:
        """The debate's answer, when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.

        Raises:
            ValueError: nobody is asked anything.
            MixtureFailed: no debater could answer in some round, or not the aggregator.
        """
        async with self.answering(question) as debating:
            return await debating.result()

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[Debating | DebateClimb]:
        """The answer as it is written; leaving the context ends every agent that still writes.

        Raises: as :meth:`answer`.
        """
        times = Times()
        listener = both(self.listener, times)
        async with Workflow(self.debaters[0].engine, ahead=self.ahead, listener=listener) as flow:
            talk = conversation(question)
            if self.staircase is None:
                debating = Debating(self, flow, talk, times)
            else:
                debating = DebateClimb(self, self.staircase, flow, talk, times)
            try:
                yield debating
            finally:
                debating.cancel()
