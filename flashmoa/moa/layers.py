"""The agents of one question in layers: their requests, who reads them and their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoa import Answer, Text, Workflow
from flashmoa.moa.agents import CallTimes, Model
from flashmoa.moa.chunks import ChunkedText, GrowingPrompt, Steps
from flashmoa.moa.cluster import AnswerSlot, Cluster, Member, Room
from flashmoa.moa.early_exit import ScoredAnswers
from flashmoa.moa.incremental_writer import IncrementalWriter
from flashmoa.moa.prompts import AggregationPrompt, Message, Messages
from flashmoa.moa.results import AgentAnswer
from flashmoa.observe import Listener


class AgentLayers:
    """Layers of agents that read whole answers; each agent is named ``LAYER.PLACE``, from 1.

    Args:
        times: listens to the workflow.
        stall_seconds: how long to wait for an answer's next piece, once it has begun.
    """

    def __init__(self, flow: Workflow, times: CallTimes, stall_seconds: float) -> None:
        self._flow = flow
        self._times = times
        self._stall_seconds = stall_seconds
        self._records: list[list[AgentAnswer]] = []
        self._answers: list[list[Answer]] = []
        # How many clusters still wait for an agent.
        self._waiting: dict[Answer, int] = {}

    def ask(self, layer: int, model: Model, messages: Sequence[Message], **more: Any) -> Answer:
        """Add an agent to a layer; its request goes out when all answers in it are complete.

        Args:
            layer: from 0; a layer that is not there yet must be the next one.
            more: parameters of the request besides the model's sampling.
        """
        if layer == len(self._answers):
            self._answers.append([])
            self._records.append([])
        place = len(self._answers[layer])
        parameters: dict[str, Any] = {"model": model.model, **model.sampling, **more}
        name = f"{layer + 1}.{place + 1}"
        answer = self._flow.ask(messages, engine=model.engine, name=name, **parameters)
        self._answers[layer].append(answer)
        self._records[layer].append(AgentAnswer(layer, place, model.model, model.engine.url))
        return answer

    def member(self, layer: int, place: int, *forms: tuple[str, str]) -> Member:
        """Return an agent as a member of a cluster.

        Args:
            forms: for each slot, what stands before the answer and what stands there without one.
        """
        answer = self._answers[layer][place]
        slots = [AnswerSlot(self._flow.version(answer), title, absent) for title, absent in forms]
        return Member(answer, self._records[layer][place], slots)

    def follow(
        self, members: Sequence[Member], room: Room, scores: ScoredAnswers | None = None
    ) -> Cluster:
        """Have the answers of a cluster flow into their slots. Takes what :class:`Cluster` does."""
        for member in members:
            self._waiting[member.answer] = self._waiting.get(member.answer, 0) + 1
        cluster = Cluster(
            members,
            room=room,
            stall_seconds=self._stall_seconds,
            scores=scores,
            leave=self._leave,
        )
        self._flow.start_soon(cluster.run)
        return cluster

    def _leave(self, member: Member) -> None:
        """Cancel an agent unless another cluster still waits for it."""
        self._waiting[member.answer] -= 1
        if not self._waiting[member.answer]:
            member.record.status = "left out"
            member.answer.cancel()

    def cancel(self) -> None:
        """Stop every agent; does nothing to those that have finished."""
        for layer in self._answers:
            for answer in layer:
                answer.cancel()

    def records(self) -> list[list[AgentAnswer]]:
        """Return what every agent wrote, and when, by layer and place."""
        for answers, records in zip(self._answers, self._records, strict=True):
            for answer, record in zip(answers, records, strict=True):
                record.text, record.usage = answer.written, answer.usage
                record.finish_reason = answer.finish_reason
                self._times.fill(record, answer.name)
        return self._records


class StaircaseLayers:
    """Layers of agents of which each writes along with the one before, chunk by chunk.

    Agents are named ``LAYER.PLACE``, from 1, and the requests of a writer ``LAYER.PLACE.ROUND``.

    Args:
        models: the first layer's, which answer the question each by itself.
        listener: is called with the events of later layers; the workflow has its own.
        stall_seconds: how long to wait for the next piece of a first layer's answer, once it has
            begun; ``None``: for ever.
    """

    def __init__(
        self,
        flow: Workflow,
        question: Messages,
        models: Sequence[Model],
        steps: Steps,
        *,
        listener: Listener,
        stall_seconds: float | None = None,
    ) -> None:
        self._flow = flow
        self._question = question
        self._models = models
        self._steps = steps
        self._listener = listener
        self._stall_seconds = stall_seconds
        self._is_cancelled = False
        self._first: list[Answer] = []
        for place, model in enumerate(models, 1):
            parameters: dict[str, Any] = {"model": model.model, **model.sampling}
            name = f"1.{place}"
            self._first.append(flow.ask(question, engine=model.engine, name=name, **parameters))
        # Of every layer but the last, the answers as the next layer reads them.
        self._chunked: list[list[ChunkedText]] = []
        self._writers: list[list[IncrementalWriter]] = []

    @property
    def answers(self) -> list[list[Text]]:
        """Return the agents' answers by layer."""
        return [[*self._first], *([one.answer for one in layer] for layer in self._writers)]

    def add(
        self, prompts: Sequence[AggregationPrompt], models: Sequence[Model]
    ) -> list[IncrementalWriter]:
        """Add a layer of agents that write along with the last layer so far.

        Args:
            prompts: one for each model; their titles of answers are the same.
        """
        # Writers wait for their own sources, and therefore may pause.
        stall_seconds = None if self._writers else self._stall_seconds
        sources: list[ChunkedText] = []
        for number, answer in enumerate(self.answers[-1], 1):
            title = "" if self._steps.order == "contiguous" else prompts[0].title(number)
            schedule = self._steps.schedule
            sources.append(ChunkedText(self._flow, answer, title, schedule, stall_seconds))
            self._flow.start_soon(sources[-1].cut)
        writers: list[IncrementalWriter] = []
        layer = len(self._writers) + 2
        for place, (prompt, model) in enumerate(zip(prompts, models, strict=True), 1):
            growing = GrowingPrompt(prompt, self._question, sources, self._steps)
            name = f"{layer}.{place}"
            writers.append(IncrementalWriter(name, model, growing, self._flow, self._listener))
            self._flow.start_soon(writers[-1].run)
        self._chunked.append(sources)
        self._writers.append(writers)
        return writers

    def cancel(self) -> None:
        """Stop every agent; does nothing to those that have finished."""
        self._is_cancelled = True
        for agent in (*self._first, *(one for layer in self._writers for one in layer)):
            agent.cancel()

    async def records(self, times: CallTimes) -> list[list[AgentAnswer]]:
        """Wait for all agents and return what each wrote, and when, by layer and place.

        Args:
            times: listens to the workflow.

        Raises: UpstreamCancelled after :meth:`cancel`, unless all had finished before.
        """
        records: list[list[AgentAnswer]] = []
        for layer, answers in enumerate(self.answers):
            records.append([])
            for place, answer in enumerate(answers):
                problem = await self._problem(answer)
                if layer:
                    record = self._writers[layer - 1][place].record(layer, place)
                else:
                    record = self._first_record(place, times)
                is_used = not problem
                if layer < len(self._chunked):
                    # An agent that wrote a chunk was read, whatever came after it.
                    source = self._chunked[layer][place]
                    is_used, problem = not source.failed, source.problem or problem
                record.status, record.problem = "used" if is_used else "failed", problem
                records[-1].append(record)
        return records

    async def _problem(self, answer: Text) -> str:
        """Wait for an answer and return what went wrong with it, ``""`` if nothing did."""
        try:
            text = await answer
        except Exception as error:
            if self._is_cancelled:
                raise
            return str(error) or type(error).__name__
        return "" if text.strip() else "it answered nothing"

    def _first_record(self, place: int, times: CallTimes) -> AgentAnswer:
        answer, model = self._first[place], self._models[place]
        record = AgentAnswer(0, place, model.model, model.engine.url, text=answer.written)
        record.usage, record.finish_reason = answer.usage, answer.finish_reason
        times.fill(record, answer.name)
        return record
