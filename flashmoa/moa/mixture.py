"""Run a Mixture-of-Agents on self-hosted engines (Faster-MoA, arXiv 2512.18126)."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from flashmoa import Answer, Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import CallTimes, Model, raise_as_mixture_failed, room_for_answers
from flashmoa.moa.cluster import Cluster
from flashmoa.moa.early_exit import EarlyExit, ScoredAnswers
from flashmoa.moa.layers import AgentLayers
from flashmoa.moa.prompts import AggregationPrompt, Messages, Question, conversation
from flashmoa.moa.results import MixtureResult
from flashmoa.moa.topology import ClusterKey, Reads, Topology
from flashmoa.observe import Listener, both, contained, ignore


class MixtureOfAgents:
    """Lets proposers answer a question, and layers of aggregators combine their answers into one.

    While agents write, their answers flow into the prompts of their readers (Faster-MoA §4.3).
    With ``early_exit``, agents that are no longer needed are cancelled (§4.2). Answers that fail
    or are empty are left out. Answers that do not fit into a reader's context are cut, the longest
    first. The result's records show both.

    Args:
        layers: the models, from the proposers' layer to the last aggregator's.
        topology: which agents read which: a :class:`Topology`, ``9-3-1`` for a tree or ``9x9x1``
            for all-to-all. The default is a tree of the layers' widths.
        prompt: the aggregators' prompt.
        early_exit: policy for all clusters in all layers; ``None``: every agent is waited for.
        ahead: which part of aggregators' prompts is prefilled before their requests; for
            comparisons.
        stall_seconds: an agent that pauses longer, once it has begun, is left out.
        listener: called with every event. Agents are named ``LAYER.PLACE``, from 1.

    Raises: ValueError if the layers do not match the topology.
    """

    def __init__(  # noqa: PLR0913 - all but the layers have a default
        self,
        layers: Sequence[Sequence[Model]],
        topology: Topology | str | None = None,
        *,
        prompt: AggregationPrompt | None = None,
        early_exit: EarlyExit | None = None,
        ahead: Ahead = "text",
        stall_seconds: float = 60.0,
        listener: Listener = ignore,
    ) -> None:
        widths = tuple(len(layer) for layer in layers)
        if topology is None:
            topology = Topology.tree(*widths)
        elif isinstance(topology, str):
            topology = Topology.parse(topology)
        if topology.widths != widths:
            raise ValueError(
                f"there are {widths} models for a topology of {topology.widths} agents; "
                "give each layer as many models as the topology has agents in it"
            )
        self.topology = topology
        self.models = layers
        self.prompt = prompt or AggregationPrompt()
        self.early_exit = early_exit
        self.ahead: Ahead = ahead
        self.stall_seconds = stall_seconds
        self.listener = contained(listener)
        self.rng = random.Random(early_exit.seed if early_exit is not None else 0)

    async def answer(self, question: Question) -> MixtureResult:
        """Return the answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.

        Raises:
            ValueError: if the last message is not a user's.
            MixtureFailed: if no agent of a cluster, or not the last aggregator, could answer.
        """
        async with self.answering(question) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[MixtureRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        Raises: as :meth:`answer`.
        """
        times = CallTimes()
        flow = Workflow(
            self.models[-1][0].engine, ahead=self.ahead, listener=both(self.listener, times)
        )
        async with flow:
            run = MixtureRun(self, flow, conversation(question), times)
            try:
                yield run
            finally:
                run.cancel()


class MixtureRun:
    """Answers one question with a mixture; ``async for`` yields the last answer's pieces."""

    def __init__(
        self, mixture: MixtureOfAgents, flow: Workflow, question: Messages, times: CallTimes
    ) -> None:
        self._mixture = mixture
        self._question = question
        self._agents = AgentLayers(flow, times, mixture.stall_seconds)
        self._clusters: dict[ClusterKey, Cluster] = {}
        for layer in range(len(mixture.models)):
            self._final = self._ask_layer(layer)

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the last aggregator's answer. Raises: as :meth:`result`."""
        with raise_as_mixture_failed("the last aggregator"):
            async for piece in self._final:
                yield piece

    async def result(self) -> MixtureResult:
        """Return the result when the answer is complete.

        Raises: MixtureFailed if no agent of a cluster, or not the last aggregator, could answer.
        """
        with raise_as_mixture_failed("the last aggregator"):
            text = await self._final
        clusters = self._clusters
        # Only the decisions on the critical path delayed the answer.
        path = self._mixture.topology.critical_path(lambda key: clusters[key].last.record.place)
        return MixtureResult(
            text,
            self._final.finish_reason,
            self._agents.records(),
            [decision for cluster in clusters.values() for decision in cluster.decisions],
            sum(clusters[key].deciding for key in path),
        )

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self._agents.cancel()

    def _ask_layer(self, layer: int) -> Answer:
        """Make a layer's requests. Each is sent when the answers that it reads are complete.

        Returns: the answer of the layer's last agent.
        """
        mixture = self._mixture
        reads = mixture.topology.layers[layer]
        slots = {places: self._start_cluster(layer, places) for places in set(reads) if places}
        answers: list[Answer] = []
        for place, model in enumerate(mixture.models[layer]):
            messages = self._question
            if reads[place]:
                messages = mixture.prompt.messages(messages, slots[reads[place]])
            # An engine mixes no prefill into decode steps of requests with log-probabilities.
            # Therefore only answers that early exit scores have them.
            more = {"logprobs": True} if self._is_scored(layer, place) else {}
            answers.append(self._agents.ask(layer, model, messages, **more))
        return answers[-1]

    def _start_cluster(self, layer: int, reads: Reads) -> list[str]:
        """Start to copy answers that agents of a layer read into slots. Return the slots' marks."""
        mixture = self._mixture
        members = [
            self._agents.make_member(layer - 1, place, (mixture.prompt.title(number), ""))
            for number, place in enumerate(reads, 1)
        ]
        policy = self._policy(reads)
        scores = ScoredAnswers(policy, mixture.rng) if policy is not None else None
        cluster = self._agents.start_cluster(members, lambda: self._room(layer, reads), scores)
        self._clusters[layer, reads] = cluster
        return [f"{member.slots[0].text}" for member in members]

    def _is_scored(self, layer: int, place: int) -> bool:
        """Return whether any cluster scores an agent's answer."""
        topology = self._mixture.topology
        readers = topology.readers(layer, place)
        return any(self._policy(topology.layers[layer + 1][reader]) for reader in readers)

    def _policy(self, reads: Reads) -> EarlyExit | None:
        """Return the early exit policy of a cluster, if one applies."""
        policy = self._mixture.early_exit
        return policy if policy is not None and policy.applies_to(len(reads)) else None

    async def _room(self, layer: int, reads: Reads) -> int | None:
        """Return how many tokens a cluster's answers may have for all its readers; None: any."""
        mixture = self._mixture
        agents = zip(mixture.models[layer], mixture.topology.layers[layer], strict=True)
        readers = [model for model, places in agents if places == reads]
        limits = [mixture.models[layer - 1][place].max_tokens for place in reads]
        titles = [mixture.prompt.title(number) for number in range(1, len(reads) + 1)]
        empty_prompt = mixture.prompt.messages(self._question, titles)
        return await room_for_answers(readers, empty_prompt, limits)
