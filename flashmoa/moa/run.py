"""Run agents in layers (``System``, ``SystemRun``): mixtures, staircases and debates.

Each agent of a layer reads agents of the layer before. Its request is sent when their answers are
complete; until then, its prompt is prefilled while they write. With ``steps``, agents read chunk by
chunk and write meanwhile.
"""

from __future__ import annotations

import time
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
    DebatePrompt,
    GrowingPrompt,
    Messages,
    Question,
    add_role,
    conversation,
    cut_answer,
    fair_shares,
    transcript,
)
from flashmoa.moa.results import AgentAnswer, Result, Spending, raise_as_mixture_failed
from flashmoa.moa.settings import (
    RUNNING_USAGE,
    Limits,
    Quorum,
    Steps,
    may_call_tools,
    needs_one_request,
)
from flashmoa.moa.topology import ClusterKey, Reads, Topology, critical_path
from flashmoa.observe import Listener
from flashmoa.observe.events import contained, ignore

# Parameters of chat completions.
Sampling = Mapping[str, Any]


class SystemSettings(TypedDict, total=False):
    """The settings that mixtures, staircases and debates have in common.

    Attributes:
        limits: time limits of agents whose models have none. An agent that takes longer is left
            out.
        fallback: who answers if the last aggregator fails.
        ahead: which part of prompts is prefilled before their requests; for comparisons.
        listener: called with every event. Agents are named ``LAYER.PLACE``, from 1.
    """

    limits: Limits | None
    fallback: Fallback | None
    ahead: Ahead
    listener: Listener


class System:
    """Answers questions with agents in layers.

    Args:
        layers: the models of every layer.
        topology: which agents read which.
        prompts: the prompt of each layer after the first.
        quorums: how many answers suffice, for each layer but the last.
        steps: the chunks that agents read while other agents write; ``None``: agents wait for whole
            answers.
        early_exit: decides which agents are waited for; ``None``: all. It needs whole answers.
    """

    def __init__(  # noqa: PLR0913 - the last two have a default
        self,
        layers: Sequence[Sequence[Model]],
        topology: Topology,
        prompts: Sequence[AggregationPrompt | DebatePrompt],
        quorums: Sequence[Quorum | None],
        *,
        settings: SystemSettings,
        steps: Steps | None = None,
        early_exit: EarlyExit | None = None,
    ) -> None:
        self.layers = layers
        self.reads = topology.layers
        self.prompts = prompts
        self.quorums = quorums
        self.steps = steps
        self.early_exit = early_exit
        # The number of the first layers whose agents answer the question. The members of a council
        # review answers in the layer after.
        self.answering_layers = len(layers) - 1
        self.limits = settings.get("limits") or Limits()
        self.fallback = settings.get("fallback") or Fallback()
        self.ahead: Ahead = settings.get("ahead", "text")
        self.listener = contained(settings.get("listener", ignore))
        self.rng = Random(early_exit.seed if early_exit is not None else 0)

    def is_scored(self, layer: int, place: int) -> bool:
        """Return whether early exit scores an agent's answer in any cluster."""
        policy, after = self.early_exit, self.reads[layer + 1 :][:1]
        clusters = [reads for layer in after for reads in layer if place in reads]
        return policy is not None and any(policy.applies_to(len(reads)) for reads in clusters)

    def in_one_request_for(self, sampling: Sampling | None = None) -> list[str]:
        """Return the names of the parameters that keep agents from writing in steps.

        Without ``steps`` there are none. The first layer always writes in one request.

        Args:
            sampling: the request's parameters, as in :meth:`answer`.
        """
        if self.steps is None:
            return []
        models = [model for layer in self.models(sampling)[1:] for model in layer]
        names = (name for model in models for name in needs_one_request(model.sampling))
        return list(dict.fromkeys(names))

    def verdict(self, result: Result) -> Mapping[str, Any]:
        """Return what the agents think of each other's answers, for JSON; only councils do."""
        return {}

    def models(self, sampling: Sampling | None) -> list[Sequence[Model]]:
        """Return the models of every layer. The last aggregator gets the request's parameters."""
        *before, last = self.layers
        return [*before, [model.with_sampling(sampling) for model in last]]

    async def answer(self, question: Question, sampling: Sampling | None = None) -> Result:
        """Return the answer when it is complete.

        Args:
            question: a text, or messages that end with a user's.
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

        Arguments and exceptions: see :meth:`answer`.
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
    """Answers one question. ``async for`` yields the pieces of the last aggregator's answer."""

    def __init__(
        self, system: System, flow: Workflow, question: Messages, sampling: Sampling | None
    ) -> None:
        self._asked = time.time()
        self._system = system
        self._flow = flow
        self._question = question
        # What all agents but the last aggregator read: only that one has the tools. If it may not
        # call them, the others answer too.
        given = sampling or {}
        self._transcript = transcript(question, ())
        self._advised = transcript(question, given["tools"] if may_call_tools(given) else ())
        self._models = system.models(sampling)
        self._sampling = sampling
        self._in_one_request_for = system.in_one_request_for(sampling)
        self._steps = None if self._in_one_request_for else system.steps
        self._agents: list[list[Agent]] = []
        # What the readers of a cluster read: whole answers, or on a staircase chunks.
        self._clusters: dict[ClusterKey, Cluster] = {}
        self._chunked: dict[ClusterKey, list[ChunkedText]] = {}
        self._cancelled = anyio.Event()
        for layer in range(len(self._models)):
            self._ask_layer(layer)
        [last] = self._agents[-1]
        self._final = FinalAnswer(
            system.fallback, last, self._answers, self._ask_another, sampling or {}
        )
        flow.start_soon(self._final.run)

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
        spent = PromptUsage.total([agent.spent() for agent in self.agents])
        result = Result(
            final.result or "",
            final.finish_reason,
            self._records(),
            Spending(spent.prompt_tokens, spent.completion_tokens),
            time_to_first_token=(final.first_token or time.time()) - self._asked,
            seconds=(final.finished or time.time()) - self._asked,
            substitution=final.substitution,
            in_one_request_for=self._in_one_request_for,
            tool_calls=final.tool_calls,
        )
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
        self._cancelled.set()
        for part in (*self._clusters.values(), *self.agents, self._final):
            part.cancel()

    def _ask_layer(self, layer: int) -> None:
        """Ask a layer's agents. Each request waits for the answers in its prompt, or for chunks."""
        system = self._system
        self._agents.append([])
        reads = system.reads[layer]
        for places in dict.fromkeys(reads) if layer else ():
            if self._steps is None:
                self._copy_answers(layer, places)
            else:
                self._cut_answers(layer, places, self._steps)
        for place, (model, places) in enumerate(zip(self._models[layer], reads, strict=True)):
            # Stock SGLang mixes no prefill into decode steps of requests with log-probabilities.
            # Therefore only answers that early exit scores have them.
            if system.is_scored(layer, place):
                model = model.with_sampling({"logprobs": True})
            if self._steps is not None:
                model = model.with_sampling(RUNNING_USAGE)
            agent = self._ask(layer, model, self._prompt(layer, place, places))
            cluster = self._clusters.get((layer, places))
            # Later layers may read all earlier rounds, too.
            if cluster is not None and not any(one.has_all_rounds for one in system.prompts):
                cluster.readers += 1
                agent.on_left_out = cluster.lose_reader

    def _prompt(self, layer: int, place: int, places: Reads) -> Messages | GrowingPrompt:
        """Return the prompt of an agent that reads the agents at ``places`` in the layer before."""
        question = self._read_in(layer)
        if not layer:
            return question
        prompt = self._system.prompts[layer - 1]
        if self._steps is not None:
            form, sources = prompt.on_staircase(place), self._chunked[layer, places]
            return GrowingPrompt(form, question, sources, self._steps)
        rounds: list[list[tuple[str, ...]]] = []
        for before in range(layer, 0, -1):
            rounds.insert(0, self._clusters[before, places].marks)
            places = self._system.reads[before - 1][places[0]]
        return prompt.for_reader(question, place, rounds)

    def _read_in(self, layer: int) -> Messages:
        """Return the conversation that the agents of a layer read."""
        if layer == len(self._models) - 1:
            return self._question
        # Whoever reviews answers does not advise.
        return self._advised if layer < self._system.answering_layers else self._transcript

    def _ask(
        self, layer: int, model: Model, prompt: Messages | GrowingPrompt, continues: str = ""
    ) -> Agent:
        """Ask the next agent of a layer."""
        agents = self._agents[layer]
        agent = Agent(
            self._flow, self._system.limits, layer, len(agents), model, continues=continues
        )
        agents.append(agent)
        self._flow.start_soon(partial(agent.run, prompt))
        return agent

    def _copy_answers(self, layer: int, places: Reads) -> None:
        """Start to copy the answers at ``places`` in the layer before into their readers' slots."""
        system, flow = self._system, self._flow
        agents = [self._agents[layer - 1][place] for place in places]
        members = [
            Member(agent, [AnswerSlot(flow.version(agent), *form) for form in forms])
            for agent, forms in zip(agents, system.prompts[layer - 1].forms(places), strict=True)
        ]
        policy, scores = system.early_exit, None
        if policy is not None and policy.applies_to(len(agents)):
            scores = ScoredAnswers(policy, system.rng, len(agents))
        room = partial(self._room, layer, places)
        cluster = Cluster(members, room, scores, system.quorums[layer - 1])
        self._clusters[layer, places] = cluster
        flow.start_soon(cluster.run)

    def _cut_answers(self, layer: int, places: Reads, steps: Steps) -> None:
        """Start to cut the answers at ``places`` in the layer before into chunks."""
        system, flow = self._system, self._flow
        agents = [self._agents[layer - 1][place] for place in places]
        prompt, quorum = system.prompts[layer - 1], system.quorums[layer - 1]
        if quorum is not None:
            flow.start_soon(partial(self._keep_quorum, quorum, agents))
        sources = self._chunked[layer, places] = []
        for number, agent in enumerate(agents, 1):
            title = "" if steps.order == "contiguous" else prompt.title(number)
            sources.append(ChunkedText(flow, agent, agent.part_tokens, title, steps))
            flow.start_soon(sources[-1].cut)

    async def _keep_quorum(self, quorum: Quorum, agents: Sequence[Agent]) -> None:
        """Leave out agents on a staircase once a quorum suffices.

        When the time is over and a quorum of agents has begun, the agents that have not begun are
        left out. When a quorum is complete, the other agents end where they are.
        """
        await wait_for_several([agent.asked.wait for agent in agents], 1)
        with anyio.move_on_after(quorum.seconds):
            await self._cancelled.wait()
        begun = [partial(_wait_for_text, agent) for agent in agents]
        await wait_for_several(begun, quorum.answers)
        for agent in agents:
            if not agent.is_over and not agent.written:
                agent.record.status = "left out"
                agent.cancel()
        await wait_for_several([agent.complete for agent in agents], quorum.answers)
        for agent in agents:
            if not agent.is_over:
                agent.cancel()

    async def _room(self, layer: int, places: Reads) -> int | None:
        """Return how many tokens the answers at ``places`` may have for all their readers.

        ``None``: any number.
        """
        system, prompts = self._system, self._system.prompts
        prompt = prompts[layer - 1]
        # The prompt of a debater or a chairman may have the answers of all earlier rounds.
        rounds = sum(one.has_all_rounds for one in prompts) if prompt.has_all_rounds else 1
        agents = enumerate(zip(self._models[layer], system.reads[layer], strict=True))
        readers = {place: model for place, (model, reads) in agents if reads == places}
        limits = [self._models[layer - 1][place].max_tokens for place in places] * rounds
        titles = [tuple(title for title, _ in forms) for forms in prompt.forms(places)]
        empty = prompt.for_reader(self._read_in(layer), min(readers), [titles] * rounds)
        # The longest role stands for all.
        role = max((reader.role for reader in readers.values()), key=len)
        room = await room_for_answers(readers.values(), add_role(empty, role), limits)
        return None if room is None else room // rounds

    async def _answers(self) -> list[list[AgentAnswer]]:
        """Wait for all layers but the last, and return the answers to the question.

        Raises: UpstreamCancelled after :meth:`cancel`, unless all agents had finished before.
        """
        # Without steps, the last layer has waited for them.
        layers = self._agents[:-1] if self._steps is not None else []
        for agent in (agent for layer in layers for agent in layer):
            try:
                await agent
            except Exception:
                if self._cancelled.is_set():
                    raise
        return self._records()[: self._system.answering_layers]

    async def _ask_another(
        self, model: Model, answers: Sequence[AgentAnswer], written: str
    ) -> Agent:
        """Ask another last aggregator to read complete answers; see :class:`FinalAnswer`."""
        model, prompt = model.with_sampling(self._sampling), self._system.prompts[-1]
        titles = [prompt.title(number) for number in range(1, len(answers) + 1)]
        lengths = [answer.tokens for answer in answers]
        empty = add_role(self._last_prompt(titles), model.role)
        shares = fair_shares(lengths, await room_for_answers([model], empty, lengths))
        titled = [
            title + cut_answer(answer.text, length, share)
            for title, answer, length, share in zip(titles, answers, lengths, shares, strict=True)
        ]
        return self._ask(len(self._models) - 1, model, self._last_prompt(titled), written)

    def _last_prompt(self, answers: Sequence[str]) -> Messages:
        """Return the last aggregator's prompt with titled answers."""
        prompt = self._system.prompts[-1]
        return prompt.for_reader(self._question, 0, [[(answer,) for answer in answers]])

    def _records(self) -> list[list[AgentAnswer]]:
        """Return the records of every agent so far, by layer and place."""
        records = [[agent.fill_record() for agent in layer] for layer in self._agents]
        for (layer, places), sources in self._chunked.items():
            for place, source in zip(places, sources, strict=True):
                record = records[layer - 1][place]
                # An agent that wrote a chunk was read, whatever came after it.
                if record.status != "left out":
                    record.problem = source.problem or record.problem
                    record.status = "failed" if source.failed else "used"
        return records


async def _wait_for_text(text: StreamedText) -> None:
    """Return when a text has begun. Raises: ValueError if it ends empty; the text's own error."""
    async for _ in text:
        return
    raise ValueError(f"{text.name} is empty")
