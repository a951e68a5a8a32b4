"""One question on its way through the layers."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from flashmoa.moa.agents import Agents, Times, explained, room_of
from flashmoa.moa.answers import MixtureResult
from flashmoa.moa.cluster import Cluster
from flashmoa.moa.early_exit import EarlyExit, ScoredAnswers
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.topology import Reads, Topology
from flashmoa.workflow import Answer, Workflow


class Plan(Protocol):
    """What a mixture is made of."""

    topology: Topology
    models: Sequence[Sequence[Model]]
    prompt: AggregationPrompt
    early_exit: EarlyExit | None
    coin: random.Random
    stall_seconds: float


class Running:
    """A question being answered; ``async for`` gives the pieces of the last answer."""

    def __init__(
        self,
        mixture: Plan,
        flow: Workflow,
        question: list[dict[str, Any]],
        times: Times,
    ) -> None:
        self._mixture = mixture
        self._question = question
        self._agents = Agents(flow, times, mixture.stall_seconds)
        self._clusters: dict[tuple[int, Reads], Cluster] = {}
        for layer in range(len(mixture.models)):
            self._final = self._start(layer)

    async def __aiter__(self) -> AsyncGenerator[str]:
        with explained("the last aggregator"):
            async for piece in self._final:
                yield piece

    async def result(self) -> MixtureResult:
        """When it is complete. Raises: MixtureFailed."""
        with explained("the last aggregator"):
            text = await self._final
        decisions = [one for cluster in self._clusters.values() for one in cluster.decisions]
        reason, layers = self._final.finish_reason, self._agents.records()
        return MixtureResult(text, reason, layers, decisions, self._deciding())

    def cancel(self) -> None:
        """Have every agent stop; harmless for those that have."""
        self._agents.cancel()

    def _deciding(self) -> float:
        """Seconds by which decisions delayed the answer."""
        clusters = self._clusters
        path = self._mixture.topology.critical_path(lambda one: clusters[one].last.record.place)
        return sum(clusters[one].deciding for one in path)

    def _start(self, layer: int) -> Answer:
        """The requests of a layer: they go out when what they read is complete."""
        mixture = self._mixture
        reads = mixture.topology.layers[layer]
        slots = {cluster: self._cluster(layer, cluster) for cluster in set(reads) if cluster}
        asked: list[Answer] = []
        for place, model in enumerate(mixture.models[layer]):
            messages = self._question
            if reads[place]:
                messages = mixture.prompt.messages(messages, slots[reads[place]])
            more = {"logprobs": True} if self._is_judged(layer, place) else {}
            asked.append(self._agents.ask(layer, model, messages, **more))
        return asked[-1]

    def _is_judged(self, layer: int, place: int) -> bool:
        """Whether an answer's confidence is asked for: an engine mixes no prefill into decode
        steps of requests with log-probabilities, so that nobody else asks for them."""
        topology = self._mixture.topology
        readers = topology.readers(layer, place)
        return any(self._policy(topology.layers[layer + 1][reader]) for reader in readers)

    def _policy(self, reads: Reads) -> EarlyExit | None:
        """What decides about leaving those early, if anything does."""
        policy = self._mixture.early_exit
        return policy if policy is not None and policy.applies_to(len(reads)) else None

    def _cluster(self, layer: int, reads: Reads) -> list[str]:
        """Have the agents followed that some of this layer read; what stands for their answers."""
        mixture = self._mixture
        members = [
            self._agents.member(layer - 1, place, (mixture.prompt.title(number), ""))
            for number, place in enumerate(reads, 1)
        ]
        policy = self._policy(reads)
        answers = ScoredAnswers(policy, mixture.coin) if policy is not None else None
        cluster = self._agents.follow(members, lambda: self._room(layer, reads), answers)
        self._clusters[layer, reads] = cluster
        return [f"{member.slots[0].text}" for member in members]

    async def _room(self, layer: int, reads: Reads) -> int | None:
        """Tokens there are for the answers a cluster gives its readers; ``None``: enough."""
        mixture = self._mixture
        readers = [
            model
            for model, theirs in zip(
                mixture.models[layer], mixture.topology.layers[layer], strict=True
            )
            if theirs == reads
        ]
        most = [mixture.models[layer - 1][place].max_tokens for place in reads]
        titles = [mixture.prompt.title(number) for number in range(1, len(reads) + 1)]
        return await room_of(readers, mixture.prompt.messages(self._question, titles), most)
