"""Run the agents of one question in layers (``AgentLayers``, ``StaircaseLayers``)."""

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
    """Runs layers of agents that read whole answers. Agents are named ``LAYER.PLACE``, from 1.

    Args:
        times: a listener of the workflow.
        stall_seconds: how long to wait for an answer's next piece, once it has begun; ``None``
            for no limit.
    """

    def __init__(
        self, flow: Workflow, times: CallTimes, stall_seconds: float | None = None
    ) -> None:
        self._flow = flow
        self._times = times
        self._stall_seconds = stall_seconds
        self._records: list[list[AgentAnswer]] = []
        self._answers: list[list[Answer]] = []
        # The number of clusters that still wait for an agent's answer.
        self._waiting: dict[Answer, int] = {}

    def ask(self, layer: int, model: Model, messages: Sequence[Message], **more: Any) -> Answer:
        """Add an agent to a layer. Its request is sent when all answers in it are complete.

        Args:
            layer: number of the layer, from 0; at most one above the last layer that has agents.
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

    def make_member(self, layer: int, place: int, *forms: tuple[str, str]) -> Member:
        """Make an agent, by its layer and place from 0, a member of a cluster.

        Args:
            forms: for each slot, the text before the answer, and the text in place of both if the
                answer is left out.
        """
        answer = self._answers[layer][place]
        slots = [AnswerSlot(self._flow.version(answer), title, absent) for title, absent in forms]
        return Member(answer, self._records[layer][place], slots)

    def start_cluster(
        self, members: Sequence[Member], room: Room, scores: ScoredAnswers | None = None
    ) -> Cluster:
        """Start to copy the answers of members into their slots.

        The arguments are those of :class:`Cluster`.
        """
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
        """Stop every agent that has not finished."""
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
    """Runs layers of agents that each read the layer before, chunk by chunk, while it writes.

    Agents are named ``LAYER.PLACE``, from 1, and the requests of a writer ``LAYER.PLACE.ROUND``.

    Args:
        models: the models of the first layer. Each of them reads only the question.
        times: a listener of the workflow.
        listener: called with the events of later layers; the workflow has its own listener.
        stall_seconds: how long to wait for the next piece of a first layer's answer, once it has
            begun; ``None`` for no limit.
    """

    def __init__(  # noqa: PLR0913 - all are parts of one question
        self,
        flow: Workflow,
        question: Messages,
        models: Sequence[Model],
        steps: Steps,
        *,
        times: CallTimes,
        listener: Listener,
        stall_seconds: float | None = None,
    ) -> None:
        self._flow = flow
        self._question = question
        self._steps = steps
        self._listener = listener
        self._stall_seconds = stall_seconds
        self._is_cancelled = False
        self._first = AgentLayers(flow, times)
        self._first_answers = [self._first.ask(0, model, question) for model in models]
        # The answers of every layer but the last, cut into the chunks that the next layer reads.
        self._chunked: list[list[ChunkedText]] = []
        self._writers: list[list[IncrementalWriter]] = []

    @property
    def answers(self) -> list[list[Text]]:
        """Return the agents' answers by layer."""
        later = [[writer.answer for writer in layer] for layer in self._writers]
        return [[*self._first_answers], *later]

    def add(
        self, prompts: Sequence[AggregationPrompt], models: Sequence[Model]
    ) -> list[IncrementalWriter]:
        """Add a layer of agents that read the last layer so far while it writes.

        Args:
            prompts: a prompt for each model. All prompts give answers the same titles.
        """
        # Agents after the first layer may pause, as they wait for their own sources.
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
        """Stop every agent that has not finished."""
        self._is_cancelled = True
        self._first.cancel()
        for writer in (writer for layer in self._writers for writer in layer):
            writer.cancel()

    async def records(self) -> list[list[AgentAnswer]]:
        """Wait for all agents and return what each wrote, and when, by layer and place.

        Raises: UpstreamCancelled after :meth:`cancel`, unless all had finished before.
        """
        problems = [[await self._wait_for(answer) for answer in layer] for layer in self.answers]
        records = [*self._first.records()]
        for number, layer in enumerate(self._writers, 1):
            records.append([writer.record(number, place) for place, writer in enumerate(layer)])
        for number, layer in enumerate(records):
            for record, problem in zip(layer, problems[number], strict=True):
                record.problem, is_used = problem, not problem
                if number < len(self._chunked):
                    # An agent that wrote a chunk was read, whatever came after it.
                    source = self._chunked[number][record.place]
                    record.problem, is_used = source.problem or problem, not source.failed
                record.status = "used" if is_used else "failed"
        return records

    async def _wait_for(self, answer: Text) -> str:
        """Wait for an answer. Return why it failed or is not usable, ``""`` if it is usable."""
        try:
            text = await answer
        except Exception as error:
            if self._is_cancelled:
                raise
            return str(error) or type(error).__name__
        return "" if text.strip() else "it answered nothing"
