"""The agents of one question: their requests, who follows them, and what became of them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flashmoa.engine import EngineError
from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.moa.answers import AgentAnswer, MixtureFailed
from flashmoa.moa.cluster import Cluster, Member, Room, Slot
from flashmoa.moa.early_exit import ScoredAnswers
from flashmoa.moa.models import Model
from flashmoa.observe import CallFinished, CallStarted, Event, FirstToken
from flashmoa.workflow import Answer, Workflow


class Agents:
    """Agents in layers; each is called ``LAYER.PLACE``, from 1.

    Args:
        times: listens to the workflow.
        stall_seconds: how long to wait for an answer's next piece, once it has begun.
    """

    def __init__(self, flow: Workflow, times: Times, stall_seconds: float) -> None:
        self._flow = flow
        self._times = times
        self._stall_seconds = stall_seconds
        self._records: list[list[AgentAnswer]] = []
        self._answers: list[list[Answer]] = []
        self._waiting: dict[int, int] = {}

    def ask(
        self, layer: int, model: Model, messages: Sequence[Mapping[str, Any]], **more: Any
    ) -> Answer:
        """One more agent of a layer; its request goes out when what it mentions is complete."""
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
        """An agent that will be read, with a slot for each form: what stands before its answer,
        and what stands there without one."""
        answer = self._answers[layer][place]
        slots = [Slot(self._flow.version(answer), title, absent) for title, absent in forms]
        return Member(answer, self._records[layer][place], slots)

    def follow(
        self, members: Sequence[Member], room: Room, answers: ScoredAnswers | None = None
    ) -> Cluster:
        """Have their answers go into their slots."""
        for member in members:
            self._waiting[id(member.answer)] = self._waiting.get(id(member.answer), 0) + 1
        cluster = Cluster(
            members,
            room=room,
            stall_seconds=self._stall_seconds,
            answers=answers,
            leave=self._leave,
        )
        self._flow.start_soon(cluster.run)
        return cluster

    def _leave(self, member: Member) -> None:
        """A cluster does not wait for an agent any more; maybe others do."""
        self._waiting[id(member.answer)] -= 1
        if not self._waiting[id(member.answer)]:
            member.record.status = "left out"
            member.answer.cancel()

    def cancel(self) -> None:
        """Have every agent stop; harmless for those that have."""
        for layer in self._answers:
            for answer in layer:
                answer.cancel()

    def records(self) -> list[list[AgentAnswer]]:
        """What every agent wrote, and when, by layer and place."""
        for answers, records in zip(self._answers, self._records, strict=True):
            for answer, record in zip(answers, records, strict=True):
                record.text, record.usage = answer.written, answer.usage
                self._times.fill(record, answer.name)
        return self._records


class Times:
    """When agents' calls began and ended (a ``Listener``)."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._finished: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self._started[event.agent] = event.at
        elif isinstance(event, FirstToken):
            self._first[event.agent] = event.at
        elif isinstance(event, CallFinished):
            self._finished[event.agent] = event.at

    def fill(self, record: AgentAnswer, agent: str) -> None:
        record.started = self._started.get(agent)
        record.first_token = self._first.get(agent)
        record.finished = self._finished.get(agent)


async def room_of(
    readers: Iterable[Model], empty: Sequence[Mapping[str, Any]], most: Sequence[int | None]
) -> int | None:
    """Tokens there are for answers in the prompt of each reader; ``None``: enough.

    Args: as :meth:`Model.free_tokens`.
    """
    rooms: list[int] = []
    for reader in {(one.engine.url, one.model): one for one in readers}.values():
        try:
            room = await reader.free_tokens(empty, most)
        except EngineError:
            continue  # It cannot be asked; if there is not enough, the request will say so.
        if room is not None:
            rooms.append(room)
    return min(rooms, default=None)


@contextmanager
def explained(who: str) -> Generator[None]:
    """What the one agent fails with that speaks for all is everybody's failure."""
    try:
        yield
    except (MixtureFailed, UpstreamCancelled):
        raise
    except Exception as error:
        raise MixtureFailed(f"{who} failed: {error}") from error
