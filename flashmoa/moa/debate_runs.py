"""Run the rounds of a debate, and conclude it (``DebateRun``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa import Text, UpstreamCancelled
from flashmoa.moa.agents import (
    Model,
    common_refusal,
    raise_as_mixture_failed,
    room_for_answers,
)
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.conclusion import Ask, Conclusion, fits, vote
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.layers import AgentLayers, fill_slots
from flashmoa.moa.prompts import AnswerForms, Messages, add_role
from flashmoa.moa.results import AgentAnswer, DebateResult, MixtureFailed, Substitution
from flashmoa.moa.sampling import token_limit
from flashmoa.moa.settings import Steps
from flashmoa.moa.staircase_layers import StaircaseLayers

if TYPE_CHECKING:
    from flashmoa.moa.debate import Debate

# Parameters of chat completions.
Sampling = Mapping[str, Any] | None


class DebateRun(ABC):
    """Answers one question in a debate.

    ``async for`` yields the pieces of the aggregator's answer or, after a vote, the whole answer.
    """

    def __init__(
        self, debate: Debate, inquiry: Inquiry, question: Messages, sampling: Sampling
    ) -> None:
        self._debate = debate
        self.inquiry = inquiry
        self._question = question
        self._sampling = sampling
        # Writes the answer if an aggregator concludes.
        self._conclusion: Conclusion | None = None
        self._voted: DebateResult | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the answer. Raises: as :meth:`result`."""
        if self._conclusion is None:
            yield (await self.result()).text
            return
        with raise_as_mixture_failed("the aggregator"):
            async for piece in self._conclusion.text:
                yield piece

    async def result(self) -> DebateResult:
        """Return the result when the answer is complete. Raises: as :meth:`Debate.answer`."""
        if self._conclusion is None:
            await self._wait_for_ballots()
            # Reading the answer and the result asks for each ballot once.
            self._voted = self._voted or self._vote(self._records())
            return self._voted
        with raise_as_mixture_failed("the aggregator"):
            await self._conclusion.text
        *rounds, [aggregate, *more] = self._records()
        return DebateResult(
            self._conclusion.result,
            self._conclusion.finish_reason,
            rounds,
            aggregate=aggregate,
            more_aggregates=more,
            spending=self.inquiry.spending(),
            substitution=self._conclusion.substitution,
            in_one_request_for=self._debate.needs_one_request(self._sampling),
        )

    def _vote(self, rounds: list[list[AgentAnswer]]) -> DebateResult:
        """Return the vote on the last round's answers, or on those of a round before it."""
        assert not isinstance(self._debate.conclusion, Model)
        texts = self._find_ballot_texts(rounds)
        answered = [any(round_) for round_ in texts]
        problem = "; ".join(answer.problem for answer in rounds[-1])
        if not any(answered) or not (answered[-1] or self._debate.fallback.best_answer):
            errors = [call.error for call in self.inquiry.calls]
            raise MixtureFailed(f"no agent answered; {problem}") from common_refusal(errors)
        last = max(number for number, is_answered in enumerate(answered) if is_answered)
        outcome = vote(texts[last], self._debate.conclusion)
        winner = rounds[last][outcome.place]
        substitution = None if answered[-1] else Substitution("answer", winner.name, problem)
        return DebateResult(
            winner.text,
            winner.finish_reason,
            rounds,
            vote=outcome,
            spending=self.inquiry.spending(),
            substitution=substitution,
            in_one_request_for=self._debate.needs_one_request(self._sampling),
        )

    def _find_ballot_texts(self, rounds: list[list[AgentAnswer]]) -> list[list[str]]:
        """Return the answers that may be voted on, by round; empty texts for the others.

        Only the last round's agents get the client's parameters, so that earlier answers may be
        longer than it asks.
        """
        limit = token_limit(self._sampling or {})
        return [
            [
                one.text if one.is_complete and (round_ is rounds[-1] or fits(one, limit)) else ""
                for one in round_
            ]
            for round_ in rounds
        ]

    def _conclude_with(
        self, model: Model, last: Text, finish_reason: Callable[[], str | None], ask: Ask
    ) -> None:
        """Let an aggregator's answer be that of the debate."""
        self._conclusion = Conclusion(
            self._debate.fallback, model, self._answers, ask, self._sampling
        )
        self.inquiry.flow.start_soon(partial(self._conclusion.run, last, finish_reason))

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        if self._conclusion is not None:
            self._conclusion.cancel()

    @abstractmethod
    async def _wait_for_ballots(self) -> None:
        """Wait until the last round's answers are complete, or are left out."""

    @abstractmethod
    async def _answers(self) -> list[list[AgentAnswer]]:
        """Wait for the debaters, and return their answers by round."""

    @abstractmethod
    def _records(self) -> list[list[AgentAnswer]]:
        """Return what every agent wrote, by round; an aggregator's come last."""


class WholeAnswerRun(DebateRun):
    """Runs a debate whose rounds begin when the answers of the round before are complete."""

    def __init__(
        self, debate: Debate, inquiry: Inquiry, question: Messages, sampling: Sampling
    ) -> None:
        super().__init__(debate, inquiry, question, sampling)
        self._agents = AgentLayers(inquiry)
        self._places = range(len(debate.debaters))
        # The texts that the debaters vote on: the last round's answers.
        self._ballot_texts: list[Text] = []
        rounds: list[list[AnswerForms]] = []
        for number in range(debate.rounds):
            votes = number == debate.rounds - 1 and not isinstance(debate.conclusion, Model)
            for place, model in enumerate(debate.debaters):
                messages = debate.prompt.messages(question, place, rounds)
                model = model.with_sampling(sampling if votes else None)
                self._agents.ask(number, model, messages, is_last=votes)
            if number < debate.rounds - 1:
                rounds.append(self._start_copying_round(number))
        if isinstance(debate.conclusion, Model):
            self._ask_aggregator(debate.conclusion.with_sampling(sampling))
        else:
            last = debate.rounds - 1
            members = [self._agents.make_member(last, place, ("", "")) for place in self._places]
            self._agents.start_cluster(members, _unlimited, quorum=debate.quorum)
            self._ballot_texts = [member.slots[0].text for member in members]

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        super().cancel()
        for text in self._ballot_texts:
            text.fail(UpstreamCancelled("the debate was cancelled"))
        self._agents.cancel()

    async def _wait_for_ballots(self) -> None:
        for text in self._ballot_texts:
            with suppress(MixtureFailed):  # The last round may be without any answer.
                await text

    async def _answers(self) -> list[list[AgentAnswer]]:
        return self._records()[: self._debate.rounds]  # The aggregator has waited for them.

    def _records(self) -> list[list[AgentAnswer]]:
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
        self._agents.start_cluster(members, self._room, quorum=self._debate.quorum)
        return [AnswerForms(*(f"{slot.text}" for slot in member.slots)) for member in members]

    def _ask_aggregator(self, model: Model) -> None:
        """Start to copy the last round's answers into an aggregator's prompt, and ask it."""
        debate, prompt = self._debate, self._debate.prompt.aggregation
        titles = [prompt.title(place + 1) for place in self._places]
        members = [
            self._agents.make_member(debate.rounds - 1, place, (title, ""))
            for place, title in enumerate(titles)
        ]

        async def room() -> int | None:
            limits = [model.max_tokens for model in debate.debaters]
            empty_prompt = add_role(prompt.messages(self._question, titles), model.role)
            return await room_for_answers([model], empty_prompt, limits)

        async def ask(model: Model, answers: Sequence[AgentAnswer], written: str) -> AgentCall:
            model = model.with_sampling(self._sampling)
            slots = await fill_slots(model, prompt, self._question, answers)
            return self._agents.ask(
                debate.rounds,
                model,
                prompt.messages(self._question, slots),
                is_last=True,
                continues=written,
            )

        self._agents.start_cluster(members, room, quorum=debate.quorum)
        slots = [f"{member.slots[0].text}" for member in members]
        messages = prompt.messages(self._question, slots)
        call = self._agents.ask(debate.rounds, model, messages, is_last=True)
        self._conclude_with(model, call, lambda: call.finish_reason, ask)

    async def _room(self) -> int | None:
        """Return how many tokens the answers of one round may have together; None: any number."""
        debate = self._debate
        titles = [AnswerForms("", debate.prompt.title(place + 1)) for place in self._places]
        rounds = debate.prompt.select_rounds([titles] * (debate.rounds - 1))
        # The longest role stands for all.
        role = max((model.role for model in debate.debaters), key=len)
        empty_prompt = add_role(debate.prompt.messages(self._question, 0, rounds), role)
        limits = [model.max_tokens for model in debate.debaters] * len(rounds)
        room = await room_for_answers(debate.debaters, empty_prompt, limits)
        return None if room is None else room // len(rounds)


class StaircaseDebateRun(DebateRun):
    """Runs a debate whose rounds overlap: debaters read chunks of answers (arXiv 2510.05059)."""

    def __init__(
        self, debate: Debate, inquiry: Inquiry, question: Messages, sampling: Sampling, steps: Steps
    ) -> None:
        super().__init__(debate, inquiry, question, sampling)
        voters = [model.with_sampling(sampling) for model in debate.debaters]
        if isinstance(debate.conclusion, Model):
            voters = debate.debaters
        rounds = [debate.debaters] * (debate.rounds - 1) + [voters]
        self._layers = StaircaseLayers(inquiry, question, rounds[0], steps, quorum=debate.quorum)
        prompts = [debate.prompt.on_staircase(place) for place in range(len(debate.debaters))]
        for models in rounds[1:]:
            self._layers.add(prompts, models, is_last=models is not debate.debaters)
        if isinstance(debate.conclusion, Model):
            self._ask_aggregator(debate.conclusion.with_sampling(sampling))
        else:
            self._layers.keep_quorum()

    def _ask_aggregator(self, aggregator: Model) -> None:
        prompt = self._debate.prompt.aggregation
        [writer] = self._layers.add([prompt], [aggregator], is_last=True)

        async def ask(model: Model, answers: Sequence[AgentAnswer], written: str) -> AgentCall:
            model = model.with_sampling(self._sampling)
            return await self._layers.ask_another(prompt, model, answers, written)

        self._conclude_with(aggregator, writer.answer, writer.finish_reason, ask)

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        super().cancel()
        self._layers.cancel()

    async def _wait_for_ballots(self) -> None:
        await self._layers.wait()

    async def _answers(self) -> list[list[AgentAnswer]]:
        await self._layers.wait(self._debate.rounds)
        return self._records()[: self._debate.rounds]

    def _records(self) -> list[list[AgentAnswer]]:
        return self._layers.records()


async def _unlimited() -> None:
    """Return that answers may have any number of tokens, as a vote reads each by itself."""
