"""One question on its way through the rounds of a debate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.linking.streamed_text import Text
from flashmoa.moa.agents import Agents, Times, explained, room_of
from flashmoa.moa.answers import DebateResult
from flashmoa.moa.debate_prompt import DebatePrompt, Told
from flashmoa.moa.models import Model
from flashmoa.moa.vote import Extract, vote
from flashmoa.workflow import Answer, Workflow


class Plan(Protocol):
    """What a debate is made of."""

    debaters: Sequence[Model]
    rounds: int
    conclusion: Extract | Model
    prompt: DebatePrompt
    stall_seconds: float


class Debating:
    """A debate under way; ``async for`` gives the pieces of its answer, or after a vote the
    answer in whole."""

    def __init__(
        self, debate: Plan, flow: Workflow, question: list[dict[str, Any]], times: Times
    ) -> None:
        self._debate = debate
        self._question = question
        self._size = len(debate.debaters)
        self._agents = Agents(flow, times, debate.stall_seconds)
        told: list[list[Told]] = []
        for number in range(debate.rounds - 1):
            self._ask(number, told)
            told.append(self._told(number))
        self._asked = self._ask(debate.rounds - 1, told)
        self._final: Answer | None = None
        self._ballots: list[Text] = []
        if isinstance(debate.conclusion, Model):
            self._final = self._aggregate(debate.conclusion)
        else:
            self._extract = debate.conclusion
            self._ballots = self._cast()

    async def __aiter__(self) -> AsyncGenerator[str]:
        if self._final is None:
            yield (await self.result()).text
            return
        with explained("the aggregator"):
            async for piece in self._final:
                yield piece

    async def result(self) -> DebateResult:
        """When it is complete. Raises: MixtureFailed, and what ``conclusion`` raises."""
        if self._final is not None:
            with explained("the aggregator"):
                text = await self._final
            *rounds, [aggregate] = self._agents.records()
            return DebateResult(text, self._final.finish_reason, rounds, aggregate=aggregate)
        texts = [await text for text in self._ballots]
        decided = vote(texts, self._extract)
        reason = self._asked[decided.place].finish_reason
        return DebateResult(texts[decided.place], reason, self._agents.records(), vote=decided)

    def cancel(self) -> None:
        """Have every agent stop; harmless for those that have."""
        for text in self._ballots:
            text.fail(UpstreamCancelled("the debate was cancelled"))
        self._agents.cancel()

    def _ask(self, number: int, told: Sequence[Sequence[Told]]) -> list[Answer]:
        """The requests of a round: they go out when all that was said before is complete."""
        debate = self._debate
        return [
            self._agents.ask(number, model, debate.prompt.messages(self._question, place, told))
            for place, model in enumerate(debate.debaters)
        ]

    def _told(self, number: int) -> list[Told]:
        """Have a round followed; what stands for its answers."""
        prompt = self._debate.prompt
        members = [
            self._agents.member(number, place, ("", prompt.absent), (prompt.title(place + 1), ""))
            for place in range(self._size)
        ]
        self._agents.follow(members, self._room)
        return [Told(*(f"{slot.text}" for slot in member.slots)) for member in members]

    def _cast(self) -> list[Text]:
        """Have the last round followed; the texts that are voted on."""
        round_ = self._debate.rounds - 1
        members = [self._agents.member(round_, place, ("", "")) for place in range(self._size)]
        self._agents.follow(members, _enough)
        return [member.slots[0].text for member in members]

    def _aggregate(self, model: Model) -> Answer:
        """Have the last round followed by an agent that makes one answer of it."""
        debate, prompt = self._debate, self._debate.prompt.aggregation
        titles = [prompt.title(number) for number in range(1, self._size + 1)]
        members = [
            self._agents.member(debate.rounds - 1, place, (title, ""))
            for place, title in enumerate(titles)
        ]

        async def room() -> int | None:
            most = [model.max_tokens for model in debate.debaters]
            return await room_of([model], prompt.messages(self._question, titles), most)

        self._agents.follow(members, room)
        slots = [f"{member.slots[0].text}" for member in members]
        return self._agents.ask(debate.rounds, model, prompt.messages(self._question, slots))

    async def _room(self) -> int | None:
        """Tokens there are for the answers of one round; ``None``: enough."""
        debate = self._debate
        titled = [Told("", debate.prompt.title(n)) for n in range(1, self._size + 1)]
        read = debate.prompt.read([titled] * (debate.rounds - 1))
        empty = debate.prompt.messages(self._question, 0, read)
        most = [model.max_tokens for model in debate.debaters] * len(read)
        room = await room_of(debate.debaters, empty, most)
        return None if room is None else room // len(read)


async def _enough() -> None:
    """A vote has room for everything."""
