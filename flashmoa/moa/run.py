"""Run agents in layers (``System``, ``SystemRun``) of mixtures, staircases and debates.

Each agent of a layer reads agents of the layer before, and its request is sent when their answers
are complete; until then its prompt is prefilled as they are written. With ``steps``, agents read
chunk by chunk and write meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, TypedDict

import anyio

from flashmoa import Workflow
from flashmoa.engine import PromptUsage
from flashmoa.link.link import Ahead
from flashmoa.link.streamed_text import StreamedText
from flashmoa.moa.agent import Agent
from flashmoa.moa.cluster import AnswerSlot, Cluster, Member, wait_for_several
from flashmoa.moa.early_exit import EarlyExit, ScoredAnswers
from flashmoa.moa.final_answer import FinalAnswer
from flashmoa.moa.models import Fallback, Model, room_for_answers
from flashmoa.moa.prompts import (
    AggregationPrompt,
    ChunkedText,
    GrowingPrompt,
    Messages,
    Question,
    add_role,
    conversation,
    cut_answer,
    fair_shares,
)
from flashmoa.moa.results import (
    AgentAnswer,
    Result,
    Spending,
    raise_as_mixture_failed,
)
from flashmoa.moa.settings import Limits, Quorum, Steps, needs_one_request
from flashmoa.moa.topology import ClusterKey, Reads, critical_path
from flashmoa.observe import Listener
from flashmoa.observe.events import contained, ignore

# Parameters of chat completions.
Sampling = Mapping[str, Any]
# For each layer after the first so far: by what is read, each answer's mark or text in each form.
Slots = Sequence[Mapping[Reads, Sequence[Sequence[str]]]]


class SystemSettings(TypedDict, total=False):
    """What mixtures, staircases and debates have in common.

    Attributes:
        limits: how long agents may take whose models do not say it themselves. An agent that takes
            longer is left out.
        fallback: what answers if the last aggregator fails.
        ahead: which part of prompts is prefilled before their requests; for comparisons.
        listener: called with every event. Agents are named ``LAYER.PLACE``, from 1.
    """

    limits: Limits | None
    fallback: Fallback | None
    ahead: Ahead
    listener: Listener


class System(ABC):
    """Agents in layers that answer questions.

    Args:
        layers: the models of every layer.
        reads: for each agent, the places in the layer before of those that it reads.
        quorums: how many answers of each layer suffice that is read.
        steps: the chunks in which answers are read while they are written; ``None``: whole.
        early_exit: decides which agents are waited for; ``None``: all. It needs whole answers.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Model]],
        reads: Sequence[Sequence[Reads]],
        quorums: Sequence[Quorum | None],
        settings: SystemSettings,
        *,
        steps: Steps | None = None,
        early_exit: EarlyExit | None = None,
    ) -> None:
        self.layers = layers
        self.reads = reads
        self.quorums = quorums
        self.steps = steps
        self.early_exit = early_exit
        self.limits = settings.get("limits") or Limits()
        self.fallback = settings.get("fallback") or Fallback()
        self.ahead: Ahead = settings.get("ahead", "text")
        self.listener = contained(settings.get("listener", ignore))
        self.rng = Random(early_exit.seed if early_exit is not None else 0)

    @abstractmethod
    def prompt(self, layer: int, place: int) -> AggregationPrompt:
        """Return the prompt of an agent that reads others, by its layer and place from 0.

        It is that of agents on a staircase, and of the last aggregator.
        """

    def forms(self, layer: int, reads: Reads) -> list[list[tuple[str, str]]]:
        """Return, for each answer that is read together, its forms in the prompts of a layer.

        Returns: for each form the text before the answer, and the text in place of both if the
            answer is left out.
        """
        prompt = self.prompt(layer, 0)
        return [[(prompt.title(number), "")] for number in range(1, len(reads) + 1)]

    def messages(self, question: Messages, layer: int, place: int, slots: Slots) -> Messages:
        """Return the messages of an agent that reads whole answers.

        Args:
            slots: those of the layers up to its own.
        """
        read = slots[-1][self.reads[layer][place]]
        return self.prompt(layer, place).messages(question, [form for (form,) in read])

    def depth(self, layer: int) -> int:
        """Return how many layers' answers a prompt has at most that has those of a layer."""
        return 1

    def is_scored(self, layer: int, place: int) -> bool:
        """Return whether early exit scores an agent's answer in any cluster."""
        policy, after = self.early_exit, self.reads[layer + 1 :][:1]
        clusters = [reads for layer in after for reads in layer if place in reads]
        return policy is not None and any(policy.applies_to(len(reads)) for reads in clusters)

    def in_one_request_for(self, sampling: Sampling | None = None) -> list[str]:
        """Return the parameters for which no agent can write its answer in steps.

        Args:
            sampling: the request's parameters, as of :meth:`answer`.

        Returns: their names; none without ``steps``. Agents of the first layer write in one request
            in any case.
        """
        if self.steps is None:
            return []
        models = [model for layer in self.models(sampling)[1:] for model in layer]
        names = (name for model in models for name in needs_one_request(model.sampling))
        return list(dict.fromkeys(names))

    def models(self, sampling: Sampling | None) -> list[Sequence[Model]]:
        """Return the models of every layer, the last one's with a request's parameters."""
        *before, last = self.layers
        return [*before, [model.with_sampling(sampling) for model in last]]

    async def answer(self, question: Question, sampling: Sampling | None = None) -> Result:
        """Return the answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.
            sampling: parameters of the last aggregator, in place of its model's.

        Raises:
            ValueError: if the last message is not a user's.
            MixtureFailed: if no agent could answer, or the last aggregator could not and
                ``fallback`` has no substitute.
        """
        async with self.answering(question, sampling) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(
        self, question: Question, sampling: Sampling | None = None
    ) -> AsyncGenerator[SystemRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        The arguments and exceptions are those of :meth:`answer`.
        """
        messages = conversation(question)
        flow = Workflow(self.layers[-1][0].engine, ahead=self.ahead, listener=self.listener)
        async with flow:
            run = SystemRun(self, flow, messages, sampling)
            try:
                yield run
            finally:
                run.cancel()


class SystemRun:
    """Answers one question.

    ``async for`` yields the pieces of the last aggregator's answer.
    """

    def __init__(
        self,
        system: System,
        flow: Workflow,
        question: Messages,
        sampling: Sampling | None,
    ) -> None:
        self._asked = time.time()
        self._system = system
        self._flow = flow
        self._question = question
        self._models = models = system.models(sampling)
        self._sampling = sampling
        self._in_one_request_for = system.in_one_request_for(sampling)
        self._steps = None if self._in_one_request_for else system.steps
        self._agents: list[list[Agent]] = []
        self._slots: list[dict[Reads, Sequence[Sequence[str]]]] = []
        self._clusters: dict[ClusterKey, Cluster] = {}
        # What agents read of answers on a staircase, and the tasks that keep its quorums.
        self._chunked: dict[ClusterKey, list[ChunkedText]] = {}
        self._quorums: list[anyio.CancelScope] = []
        self._is_cancelled = False
        for layer in range(len(models)):
            self._ask_layer(layer)
        [last] = self._agents[-1]
        self._final = FinalAnswer(
            system.fallback, last, self._answers, self._ask_another, sampling or {}
        )
        self._flow.start_soon(self._final.run)

    @property
    def agents(self) -> Sequence[Agent]:
        """Return every agent so far."""
        return [agent for layer in self._agents for agent in layer]

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the answer. Raises: as :meth:`result`."""
        with raise_as_mixture_failed():
            async for piece in self._final.text:
                yield piece

    async def result(self) -> Result:
        """Return the result when the answer is complete. Raises: as :meth:`System.answer`."""
        final = self._final
        with raise_as_mixture_failed():
            await final.text
        result = self._make_result(final.result, final.finish_reason)
        result.time_to_first_token = (final.first_token or time.time()) - self._asked
        result.seconds = (final.finished or time.time()) - self._asked
        result.substitution = final.substitution
        clusters = self._clusters
        result.decisions = [one for cluster in clusters.values() for one in cluster.decisions]
        if self._system.early_exit is not None:
            # Only the decisions on the critical path delayed the answer.
            reads = self._system.reads
            path = critical_path(reads, lambda key: clusters[key].last.agent.record.place)
            result.deciding = sum(clusters[key].deciding for key in path)
        return result

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self._is_cancelled = True
        for part in (*self._quorums, *self._clusters.values(), *self.agents):
            part.cancel()
        self._final.cancel()

    def _make_result(self, text: str, finish_reason: str | None) -> Result:
        spending = PromptUsage.total([agent.spent() for agent in self.agents])
        spending = Spending(spending.prompt_tokens, spending.completion_tokens)
        one = self._in_one_request_for
        return Result(text, finish_reason, self._records(), spending, in_one_request_for=one)

    def _ask_layer(self, layer: int) -> None:
        """Make a layer's requests. Each is sent when what it reads is complete, or has a chunk."""
        system, question = self._system, self._question
        reads = system.reads[layer]
        if layer:
            self._slots.append({})
        for places in dict.fromkeys(reads):
            if places:
                self._start_reading(layer, places)
        agents: list[Agent] = []
        for place, (model, places) in enumerate(zip(self._models[layer], reads, strict=True)):
            prompt: Messages | GrowingPrompt = question
            if places and self._steps is not None:
                sources, form = self._chunked[layer, places], system.prompt(layer, place)
                prompt = GrowingPrompt(form, question, sources, self._steps)
            elif places:
                prompt = system.messages(question, layer, place, self._slots)
            # Stock SGLang mixes no prefill into decode steps of requests with log-probabilities.
            # Therefore only answers that early exit scores have them.
            if system.is_scored(layer, place):
                model = model.with_sampling({"logprobs": True})
            agents.append(Agent(self._flow, system.limits, layer, place, model))
            self._flow.start_soon(partial(agents[-1].run, prompt))
        self._agents.append(agents)

    def _start_reading(self, layer: int, reads: Reads) -> None:
        """Start to copy what is read together by agents of a layer.

        Args:
            reads: places in the layer before.
        """
        system, flow = self._system, self._flow
        agents = [self._agents[layer - 1][place] for place in reads]
        quorum = system.quorums[layer - 1]
        if self._steps is not None:
            if quorum is not None:
                flow.start_soon(partial(self._keep_quorum, quorum, agents))
            self._chunked[layer, reads] = self._cut(layer, agents, self._steps)
            return
        forms = system.forms(layer, reads)
        members = [
            Member(agent, [AnswerSlot(flow.version(agent), *form) for form in each])
            for agent, each in zip(agents, forms, strict=True)
        ]
        policy, scores = system.early_exit, None
        if policy is not None and policy.applies_to(len(agents)):
            scores = ScoredAnswers(policy, system.rng, len(agents))
        cluster = Cluster(members, partial(self._room, layer, reads), scores, quorum)
        self._clusters[layer, reads] = cluster
        self._slots[-1][reads] = cluster.marks
        flow.start_soon(cluster.run)

    def _cut(self, layer: int, agents: Sequence[Agent], steps: Steps) -> list[ChunkedText]:
        """Start to cut the answers of agents into chunks for the readers in a layer."""
        prompt = self._system.prompt(layer, 0)
        sources: list[ChunkedText] = []
        for number, agent in enumerate(agents, 1):
            title = "" if steps.order == "contiguous" else prompt.title(number)
            sources.append(ChunkedText(self._flow, agent, title, steps))
            self._flow.start_soon(sources[-1].cut)
        return sources

    async def _keep_quorum(self, quorum: Quorum, agents: Sequence[Agent]) -> None:
        """Leave out agents on a staircase once a quorum suffices.

        When the time is over and enough of them have begun, those that have not are left out. When
        enough of them are complete, the others end where they are.
        """

        def leave_out(others: Sequence[Agent], *, is_used: bool) -> None:
            for other in others:
                other.record.status = "used" if is_used else "left out"
                other.cancel()

        scope = anyio.CancelScope()
        self._quorums.append(scope)
        with scope:
            await wait_for_several([agent.asked.wait for agent in agents], 1)
            await anyio.sleep(quorum.seconds)
            begun = [partial(_wait_for_text, agent) for agent in agents]
            await wait_for_several(begun, quorum.answers)
            open_ = [agent for agent in agents if not agent.is_over]
            leave_out([agent for agent in open_ if not agent.written], is_used=False)
            await wait_for_several([agent.complete for agent in agents], quorum.answers)
            leave_out([agent for agent in agents if not agent.is_over], is_used=True)

    async def _room(self, layer: int, reads: Reads) -> int | None:
        """Return how many tokens a cluster's answers may have for all its readers; None: any."""
        system, depth = self._system, self._system.depth(layer)
        agents = enumerate(zip(self._models[layer], system.reads[layer], strict=True))
        readers = {place: model for place, (model, places) in agents if places == reads}
        limits = [self._models[layer - 1][place].max_tokens for place in reads] * depth
        titles = [[title for title, _ in forms] for forms in system.forms(layer, reads)]
        empty = system.messages(self._question, layer, min(readers), [{reads: titles}] * depth)
        # The longest role stands for all.
        role = max((reader.role for reader in readers.values()), key=len)
        room = await room_for_answers(readers.values(), add_role(empty, role), limits)
        return None if room is None else room // depth

    async def _answers(self) -> list[list[AgentAnswer]]:
        """Wait for the agents of all layers but the last.

        Returns: their answers.

        Raises: UpstreamCancelled after :meth:`cancel`, unless all had finished before.
        """
        layers = len(self._models) - 1
        # Without steps, the next layer has waited for them.
        for agent in self.agents if self._steps is not None else ():
            if agent.record.layer < layers:
                try:
                    await agent
                except Exception:
                    if self._is_cancelled:
                        raise
        return self._records()[:layers]

    async def _ask_another(
        self, model: Model, answers: Sequence[AgentAnswer], written: str
    ) -> Agent:
        """Ask another last aggregator; see :class:`FinalAnswer`."""
        layer, model = len(self._models) - 1, model.with_sampling(self._sampling)
        prompt, place = self._system.prompt(layer, 0), len(self._agents[-1])
        slots = await _fill_slots(model, prompt, self._question, answers)
        agent = Agent(self._flow, self._system.limits, layer, place, model, continues=written)
        self._agents[-1].append(agent)
        self._flow.start_soon(partial(agent.run, prompt.messages(self._question, slots)))
        return agent

    def _records(self) -> list[list[AgentAnswer]]:
        """Return what every agent did so far, by layer and place."""
        records = [[agent.fill_record() for agent in layer] for layer in self._agents]
        for (layer, reads), sources in self._chunked.items():
            for place, source in zip(reads, sources, strict=True):
                record = records[layer - 1][place]
                # An agent that wrote a chunk was read, whatever came after it.
                if record.status != "left out":
                    record.problem = source.problem or record.problem
                    record.status = "failed" if source.failed else "used"
        return records


async def _fill_slots(
    reader: Model, prompt: AggregationPrompt, question: Messages, answers: Sequence[AgentAnswer]
) -> list[str]:
    """Return the titled texts of complete answers, cut to fit into the prompt of a reader."""
    titles = [prompt.title(number) for number in range(1, len(answers) + 1)]
    lengths = [one.tokens for one in answers]
    empty_prompt = add_role(prompt.messages(question, titles), reader.role)
    shares = fair_shares(lengths, await room_for_answers([reader], empty_prompt, lengths))
    return [
        title + cut_answer(one.text, length, share)
        for title, one, length, share in zip(titles, answers, lengths, shares, strict=True)
    ]


async def _wait_for_text(text: StreamedText) -> None:
    """Return when a text has begun. Raises: ValueError if it ends empty; the text's own error."""
    async for _ in text:
        return
    raise ValueError(f"{text.name} is empty")
