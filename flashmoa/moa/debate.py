"""Let several models answer, read each other's answers and answer again (``Debate``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from flashmoa import Answer, Text, UpstreamCancelled, Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import CallTimes, Model, raise_as_mixture_failed, room_for_answers
from flashmoa.moa.chunks import Steps
from flashmoa.moa.layers import AgentLayers, StaircaseLayers
from flashmoa.moa.prompts import AnswerForms, DebatePrompt, Messages, Question, conversation
from flashmoa.moa.results import AgentAnswer, DebateResult, MixtureFailed, Vote
from flashmoa.observe import Listener, both, contained, ignore

# Returns the ballot in an answer, such as its final number or letter; None if it has none.
Extract = Callable[[str], str | None]


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
            for whole answers.
        ahead: which part of later rounds' prompts is prefilled before their requests; for
            comparisons.
        stall_seconds: a debater that pauses longer, once it has begun, is left out of the round.
        listener: called with every event. Agents are named ``ROUND.PLACE``, from 1.

    Raises: ValueError if there are fewer than two debaters, or no round.
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
        if len(debaters) < 2:
            raise ValueError(f"a debate needs at least two debaters; there are {len(debaters)}")
        if rounds < 1:
            raise ValueError(f"a debate needs at least one round; rounds is {rounds}")
        self.debaters = debaters
        self.rounds = rounds
        self.conclusion = conclusion
        self.prompt = prompt or DebatePrompt()
        self.staircase = staircase
        self.ahead: Ahead = ahead
        self.stall_seconds = stall_seconds
        self.listener = contained(listener)

    async def answer(self, question: Question) -> DebateResult:
        """Return the debate's answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.

        Raises:
            ValueError: if the last message is not a user's.
            MixtureFailed: if no debater could answer in some round, or the aggregator could not.
            Exception: if the function ``conclusion`` raises it.
        """
        async with self.answering(question) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[DebateRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        Raises: as :meth:`answer`.
        """
        times = CallTimes()
        listener = both(self.listener, times)
        async with Workflow(self.debaters[0].engine, ahead=self.ahead, listener=listener) as flow:
            messages = conversation(question)
            if self.staircase is None:
                run = _WholeAnswerRun(self, flow, messages, times)
            else:
                run = _StaircaseDebateRun(self, flow, messages, times, self.staircase)
            try:
                yield run
            finally:
                run.cancel()


class DebateRun(ABC):
    """Answers one question in a debate.

    ``async for`` yields the pieces of the aggregator's answer or, after a vote, the whole answer.
    """

    def __init__(self, debate: Debate) -> None:
        self._debate = debate
        # The aggregator's answer; None if the debaters vote.
        self._aggregate: Text | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the answer. Raises: as :meth:`result`."""
        if self._aggregate is None:
            yield (await self.result()).text
            return
        with raise_as_mixture_failed("the aggregator"):
            async for piece in self._aggregate:
                yield piece

    async def result(self) -> DebateResult:
        """Return the result when the answer is complete.

        Raises:
            MixtureFailed: if no debater could answer in some round, or the aggregator could not.
            Exception: if the function ``conclusion`` raises it.
        """
        if self._aggregate is not None:
            with raise_as_mixture_failed("the aggregator"):
                text = await self._aggregate
            *rounds, [aggregate] = await self._records()
            return DebateResult(text, aggregate.finish_reason, rounds, aggregate=aggregate)
        rounds = await self._records()
        texts = [answer.text if answer.status == "used" else "" for answer in rounds[-1]]
        if not any(texts):
            problems = "; ".join(answer.problem for answer in rounds[-1])
            raise MixtureFailed(f"no agent answered; {problems}")
        assert not isinstance(self._debate.conclusion, Model)
        outcome = vote(texts, self._debate.conclusion)
        reason = rounds[-1][outcome.place].finish_reason
        return DebateResult(texts[outcome.place], reason, rounds, vote=outcome)

    @abstractmethod
    def cancel(self) -> None:
        """Stop every agent that has not finished."""

    @abstractmethod
    async def _records(self) -> list[list[AgentAnswer]]:
        """Wait for the debaters' last answers and return what every agent wrote, by round."""


class _WholeAnswerRun(DebateRun):
    """Runs a debate whose rounds begin when the answers of the round before are complete."""

    def __init__(
        self, debate: Debate, flow: Workflow, question: Messages, times: CallTimes
    ) -> None:
        super().__init__(debate)
        self._question = question
        self._agents = AgentLayers(flow, times, debate.stall_seconds)
        self._places = range(len(debate.debaters))
        # The texts that the debaters vote on: the last round's answers.
        self._ballot_texts: list[Text] = []
        rounds: list[list[AnswerForms]] = []
        for number in range(debate.rounds):
            for place, model in enumerate(debate.debaters):
                messages = debate.prompt.messages(question, place, rounds)
                self._agents.ask(number, model, messages)
            if number < debate.rounds - 1:
                rounds.append(self._start_copying_round(number))
        if isinstance(debate.conclusion, Model):
            self._aggregate = self._ask_aggregator(debate.conclusion)
        else:
            last = debate.rounds - 1
            members = [self._agents.make_member(last, place, ("", "")) for place in self._places]
            self._agents.start_cluster(members, _unlimited)
            self._ballot_texts = [member.slots[0].text for member in members]

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        for text in self._ballot_texts:
            text.fail(UpstreamCancelled("the debate was cancelled"))
        self._agents.cancel()

    async def _records(self) -> list[list[AgentAnswer]]:
        for text in self._ballot_texts:
            await text
        return self._agents.records()

    def _start_copying_round(self, number: int) -> list[AnswerForms]:
        """Start to copy a round's answers into slots. Return the slots' marks by debater."""
        prompt = self._debate.prompt
        members = [
            self._agents.make_member(
                number, place, ("", prompt.absent), (prompt.title(place + 1), "")
            )
            for place in self._places
        ]
        self._agents.start_cluster(members, self._room)
        return [AnswerForms(*(f"{slot.text}" for slot in member.slots)) for member in members]

    def _ask_aggregator(self, model: Model) -> Answer:
        """Start to copy the last round's answers into an aggregator's prompt, and ask it."""
        debate, prompt = self._debate, self._debate.prompt.aggregation
        titles = [prompt.title(place + 1) for place in self._places]
        members = [
            self._agents.make_member(debate.rounds - 1, place, (title, ""))
            for place, title in enumerate(titles)
        ]

        async def room() -> int | None:
            limits = [model.max_tokens for model in debate.debaters]
            return await room_for_answers([model], prompt.messages(self._question, titles), limits)

        self._agents.start_cluster(members, room)
        slots = [f"{member.slots[0].text}" for member in members]
        return self._agents.ask(debate.rounds, model, prompt.messages(self._question, slots))

    async def _room(self) -> int | None:
        """Return how many tokens the answers of one round may have together; None: any number."""
        debate = self._debate
        titles = [AnswerForms("", debate.prompt.title(place + 1)) for place in self._places]
        rounds = debate.prompt.select_rounds([titles] * (debate.rounds - 1))
        empty_prompt = debate.prompt.messages(self._question, 0, rounds)
        limits = [model.max_tokens for model in debate.debaters] * len(rounds)
        room = await room_for_answers(debate.debaters, empty_prompt, limits)
        return None if room is None else room // len(rounds)


class _StaircaseDebateRun(DebateRun):
    """Runs a debate whose rounds overlap: debaters read chunks of answers (arXiv 2510.05059)."""

    def __init__(
        self, debate: Debate, flow: Workflow, question: Messages, times: CallTimes, steps: Steps
    ) -> None:
        super().__init__(debate)
        self._layers = StaircaseLayers(
            flow,
            question,
            debate.debaters,
            steps,
            times=times,
            listener=debate.listener,
            stall_seconds=debate.stall_seconds,
        )
        prompts = [debate.prompt.on_staircase(place) for place in range(len(debate.debaters))]
        for _ in range(1, debate.rounds):
            self._layers.add(prompts, debate.debaters)
        if isinstance(debate.conclusion, Model):
            [writer] = self._layers.add([debate.prompt.aggregation], [debate.conclusion])
            self._aggregate = writer.answer

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self._layers.cancel()

    async def _records(self) -> list[list[AgentAnswer]]:
        return await self._layers.records()


async def _unlimited() -> None:
    """Return that answers may have any number of tokens, as a vote reads each by itself."""


def vote(answers: Sequence[str], extract: Extract) -> Vote:
    """Return the most common ballot in answers. Empty answers have no ballot.

    In a tie the ballot that comes first wins. If no answer has a ballot, ``place`` is that of the
    first answer that is not empty.

    Raises:
        ValueError: if all answers are empty.
        Exception: if ``extract`` raises it.
    """
    nonempty = [place for place, answer in enumerate(answers) if answer]
    if not nonempty:
        raise ValueError(f"a vote needs an answer; all {len(answers)} are empty")
    ballots = tuple(extract(answer) if answer else None for answer in answers)
    # If several ballots are equally common, most_common() returns the first of them.
    common = Counter(ballot for ballot in ballots if ballot is not None).most_common(1)
    if not common:
        return Vote(ballots, None, 0, nonempty[0])
    winner, count = common[0]
    return Vote(ballots, winner, count, ballots.index(winner))
