"""One question on its way through a debate on a staircase: each round writes along with the last.

Every debater of a round begins when all of the round before have written a chunk, and goes on as
theirs go on (Staircase Streaming, arXiv 2510.05059).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Protocol

from flashmoa.linking.streamed_text import Text
from flashmoa.moa.agents import Times, explained
from flashmoa.moa.answers import AgentAnswer, DebateResult, MixtureFailed
from flashmoa.moa.chunks import Chunks, cut_all
from flashmoa.moa.climber import Climber
from flashmoa.moa.debate_prompt import DebatePrompt
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.steps import Steps
from flashmoa.moa.view import View
from flashmoa.moa.vote import Extract, vote
from flashmoa.observe import Listener
from flashmoa.workflow import Answer, Workflow


class Plan(Protocol):
    """What a debate on a staircase is made of."""

    debaters: Sequence[Model]
    rounds: int
    conclusion: Extract | Model
    prompt: DebatePrompt
    stall_seconds: float
    listener: Listener


class DebateClimb:
    """A debate under way on a staircase; ``async for`` gives the pieces of its answer, or after a
    vote the answer in whole."""

    def __init__(
        self,
        debate: Plan,
        steps: Steps,
        flow: Workflow,
        question: list[dict[str, Any]],
        times: Times,
    ) -> None:
        self._debate = debate
        self._steps = steps
        self._flow = flow
        self._question = question
        self._times = times
        self._is_cancelled = False
        self._first = [self._ask(place, model) for place, model in enumerate(debate.debaters)]
        # By round: what is written, in which chunks, and by whom from the second one on.
        self._texts: list[list[Text]] = [[*self._first]]
        self._chunks: list[list[Chunks]] = []
        self._climbers: list[list[Climber]] = []
        seats = [debate.prompt.seat(place) for place in range(len(debate.debaters))]
        for _ in range(1, debate.rounds):
            self._climb(seats, debate.debaters)
        self._extract: Extract | None = None
        if isinstance(debate.conclusion, Model):
            self._climb([debate.prompt.aggregation], [debate.conclusion])
        else:
            self._extract = debate.conclusion

    async def __aiter__(self) -> AsyncGenerator[str]:
        if self._extract is not None:
            yield (await self.result()).text
            return
        with explained("the aggregator"):
            async for piece in self._texts[-1][0]:
                yield piece

    async def result(self) -> DebateResult:
        """When it is complete. Raises: MixtureFailed, and what ``conclusion`` raises."""
        if self._extract is None:
            with explained("the aggregator"):
                text = await self._texts[-1][0]
            *rounds, [aggregate] = await self._records()
            reason = self._climbers[-1][0].finish_reason
            return DebateResult(text, reason, rounds, aggregate=aggregate)
        rounds = await self._records()
        texts = [one.text if one.status == "used" else "" for one in rounds[-1]]
        if not any(texts):
            problems = "; ".join(one.problem for one in rounds[-1])
            raise MixtureFailed(f"no agent answered; {problems}")
        decided = vote(texts, self._extract)
        last = self._climbers[-1] if self._climbers else self._first
        return DebateResult(
            texts[decided.place], last[decided.place].finish_reason, rounds, vote=decided
        )

    def cancel(self) -> None:
        """Have every agent stop; harmless for those that have."""
        self._is_cancelled = True
        for layer in (self._first, *self._climbers):
            for agent in layer:
                agent.cancel()

    def _ask(self, place: int, model: Model) -> Answer:
        parameters: dict[str, Any] = {"model": model.model, **model.sampling}
        name = f"1.{place + 1}"
        return self._flow.ask(self._question, engine=model.engine, name=name, **parameters)

    def _climb(self, prompts: Sequence[AggregationPrompt], models: Sequence[Model]) -> None:
        """One more layer of agents, who write along with the one before."""
        # Who waits for others may pause.
        patience = None if self._chunks else self._debate.stall_seconds
        read = cut_all(self._flow, self._texts[-1], prompts[0], self._steps, patience)
        self._chunks.append(read)
        self._texts.append([])
        self._climbers.append([])
        for place, (prompt, model) in enumerate(zip(prompts, models, strict=True), 1):
            name = f"{len(self._texts)}.{place}"
            climber = Climber(
                name,
                model,
                View(prompt, self._question, read),
                steps=self._steps,
                flow=self._flow,
                listener=self._debate.listener,
            )
            text = self._flow.text(name)
            self._flow.start_soon(partial(climber.write_into, text))
            self._texts[-1].append(text)
            self._climbers[-1].append(climber)

    async def _records(self) -> list[list[AgentAnswer]]:
        """What every agent wrote, and when, once all are done. Raises: UpstreamCancelled."""
        records: list[list[AgentAnswer]] = []
        for layer, texts in enumerate(self._texts):
            records.append([])
            for place, text in enumerate(texts):
                record = await self._record(layer, place, text)
                if layer < len(self._chunks):
                    # Who wrote a chunk was read, whatever came then.
                    read = self._chunks[layer][place]
                    record.status = "failed" if read.failed else "used"
                    record.problem = read.problem or record.problem
                records[-1].append(record)
        return records

    async def _record(self, layer: int, place: int, text: Text) -> AgentAnswer:
        problem = ""
        try:
            await text
        except Exception as error:
            if self._is_cancelled:
                raise
            problem = str(error) or type(error).__name__
        if not problem and not text.written.strip():
            problem = "it answered nothing"
        record = (
            self._climbers[layer - 1][place].record(layer, place) if layer else self._asked(place)
        )
        record.text, record.problem = text.written, problem
        record.status = "failed" if problem else "used"
        return record

    def _asked(self, place: int) -> AgentAnswer:
        """What one did in the first round, in one request."""
        answer, model = self._first[place], self._debate.debaters[place]
        record = AgentAnswer(0, place, model.model, model.engine.url, usage=answer.usage)
        self._times.fill(record, answer.name)
        return record
