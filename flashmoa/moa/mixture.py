"""Run a Mixture-of-Agents on self-hosted engines (Faster-MoA, arXiv 2512.18126)."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from flashmoa import Workflow
from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import Model, raise_as_mixture_failed, room_for_answers
from flashmoa.moa.calls import AgentCall
from flashmoa.moa.cluster import Cluster
from flashmoa.moa.conclusion import Conclusion
from flashmoa.moa.early_exit import EarlyExit, ScoredAnswers
from flashmoa.moa.inquiry import Inquiry
from flashmoa.moa.layers import AgentLayers, fill_slots
from flashmoa.moa.prompts import AggregationPrompt, Messages, Question, add_role, conversation
from flashmoa.moa.results import AgentAnswer, MixtureResult
from flashmoa.moa.settings import Budget, Fallback, Limits, Quorum, check_quorums
from flashmoa.moa.topology import ClusterKey, Reads, Topology
from flashmoa.observe import Listener, contained, ignore


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
        prompt: the aggregators' prompt, or a prompt for each layer after the first.
        early_exit: policy for all clusters in all layers; ``None``: every agent is waited for.
        quorum: how many answers of a cluster suffice after some time, or one such setting for each
            layer but the last; ``None``: all are waited for.
        limits: how long agents may take whose models do not say it themselves. An agent that takes
            longer is left out.
        budget: what a question may cost; ``None``: anything.
        fallback: what answers if the last aggregator fails.
        ahead: which part of aggregators' prompts is prefilled before their requests; for
            comparisons.
        listener: called with every event. Agents are named ``LAYER.PLACE``, from 1.

    Raises: ValueError if the layers do not match the topology, or the prompts or quorums the
        layers, or if a quorum needs more answers than are read together.
    """

    def __init__(  # noqa: PLR0913 - all but the layers have a default
        self,
        layers: Sequence[Sequence[Model]],
        topology: Topology | str | None = None,
        *,
        prompt: AggregationPrompt | Sequence[AggregationPrompt] | None = None,
        early_exit: EarlyExit | None = None,
        quorum: Quorum | Sequence[Quorum | None] | None = None,
        limits: Limits | None = None,
        budget: Budget | None = None,
        fallback: Fallback | None = None,
        ahead: Ahead = "text",
        listener: Listener = ignore,
    ) -> None:
        widths = tuple(len(layer) for layer in layers)
        self.topology = Topology.of(widths, topology)
        self.models = layers
        if isinstance(prompt, AggregationPrompt) or prompt is None:
            prompt = [prompt or AggregationPrompt()] * (len(layers) - 1)
        if isinstance(quorum, Quorum) or quorum is None:
            quorum = [quorum] * (len(layers) - 1)
        for name, given in (("prompts", prompt), ("quorums", quorum)):
            if len(given) != len(layers) - 1:
                raise ValueError(
                    f"there are {len(given)} {name} for {len(layers)} layers; give one, or one "
                    f"for each of {len(layers) - 1} layers of aggregators"
                )
        check_quorums(quorum, self.topology.cluster_sizes())
        self.prompts = prompt
        self.quorums = quorum
        self.early_exit = early_exit
        self.limits = limits or Limits()
        self.budget = budget
        self.fallback = fallback or Fallback()
        self.ahead: Ahead = ahead
        self.listener = contained(listener)
        self.rng = random.Random(early_exit.seed if early_exit is not None else 0)

    async def answer(
        self, question: Question, sampling: Mapping[str, Any] | None = None
    ) -> MixtureResult:
        """Return the answer when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.
            sampling: parameters of the last aggregator in place of its model's.

        Raises:
            ValueError: if the last message is not a user's.
            MixtureFailed: if no agent could answer, or the last aggregator could not and
                ``fallback`` has no substitute.
        """
        async with self.answering(question, sampling) as run:
            return await run.result()

    @asynccontextmanager
    async def answering(
        self, question: Question, sampling: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[MixtureRun]:
        """Answer a question and yield the run. Leaving the context stops every agent.

        The arguments and exceptions are those of :meth:`answer`.
        """
        messages = conversation(question)
        flow = Workflow(self.models[-1][0].engine, ahead=self.ahead, listener=self.listener)
        async with flow:
            inquiry = Inquiry(flow, self.listener, self.limits, self.budget)
            run = MixtureRun(self, inquiry, messages, sampling)
            try:
                yield run
            finally:
                run.cancel()


class MixtureRun:
    """Answers one question with a mixture; ``async for`` yields the last answer's pieces.

    Attributes:
        agents: every agent.
        conclusion: writes the answer.
    """

    def __init__(
        self,
        mixture: MixtureOfAgents,
        inquiry: Inquiry,
        question: Messages,
        sampling: Mapping[str, Any] | None,
    ) -> None:
        self._mixture = mixture
        self.inquiry = inquiry
        self._question = question
        self._sampling = sampling
        [last] = mixture.models[-1]
        self._models = [*mixture.models[:-1], [last.with_sampling(sampling)]]
        self.agents = AgentLayers(inquiry)
        self._clusters: dict[ClusterKey, Cluster] = {}
        *_, final = [self._ask_layer(layer) for layer in range(len(self._models))]
        self.conclusion = Conclusion(
            mixture.fallback, self._models[-1][0], self._answers, self._ask_another, sampling
        )
        inquiry.flow.start_soon(partial(self.conclusion.run, final, lambda: final.finish_reason))

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield the pieces of the answer. Raises: as :meth:`result`."""
        with raise_as_mixture_failed("the last aggregator"):
            async for piece in self.conclusion.text:
                yield piece

    async def result(self) -> MixtureResult:
        """Return the result when the answer is complete.

        Raises: MixtureFailed as :meth:`MixtureOfAgents.answer`.
        """
        with raise_as_mixture_failed("the last aggregator"):
            await self.conclusion.text
        clusters = self._clusters
        # Only the decisions on the critical path delayed the answer.
        path = self._mixture.topology.critical_path(lambda key: clusters[key].last.record.place)
        return MixtureResult(
            self.conclusion.result,
            self.conclusion.finish_reason,
            self.agents.records(),
            [decision for cluster in clusters.values() for decision in cluster.decisions],
            sum(clusters[key].deciding for key in path),
            self.inquiry.spending(),
            self.conclusion.substitution,
        )

    def cancel(self) -> None:
        """Stop every agent that has not finished."""
        self.conclusion.cancel()
        self.agents.cancel()

    async def _answers(self) -> list[list[AgentAnswer]]:
        """Return the agents before the last aggregator, which has waited for them."""
        return self.agents.records()[:-1]

    async def _ask_another(
        self, model: Model, answers: Sequence[AgentAnswer], written: str
    ) -> AgentCall:
        """Ask another last aggregator; see :class:`Conclusion`."""
        prompt = self._mixture.prompts[-1]
        model = model.with_sampling(self._sampling)
        slots = await fill_slots(model, prompt, self._question, answers)
        return self.agents.ask(
            len(self._models) - 1,
            model,
            prompt.messages(self._question, slots),
            is_last=True,
            continues=written,
        )

    def _ask_layer(self, layer: int) -> AgentCall:
        """Make a layer's requests. Each is sent when the answers that it reads are complete.

        Returns: the call of the layer's last agent.
        """
        mixture = self._mixture
        reads = mixture.topology.layers[layer]
        slots = {places: self._start_cluster(layer, places) for places in set(reads) if places}
        calls: list[AgentCall] = []
        is_last = layer == len(self._models) - 1
        for place, model in enumerate(self._models[layer]):
            messages = self._question
            if reads[place]:
                messages = mixture.prompts[layer - 1].messages(messages, slots[reads[place]])
            # Stock SGLang mixes no prefill into decode steps of requests with log-probabilities.
            # Therefore only answers that early exit scores have them.
            more: dict[str, Any] = {"logprobs": True} if self._is_scored(layer, place) else {}
            calls.append(self.agents.ask(layer, model, messages, is_last=is_last, **more))
        return calls[-1]

    def _start_cluster(self, layer: int, reads: Reads) -> list[str]:
        """Start to copy answers that agents of a layer read into slots. Return the slots' marks."""
        mixture, prompt = self._mixture, self._mixture.prompts[layer - 1]
        members = [
            self.agents.make_member(layer - 1, place, (prompt.title(number), ""))
            for number, place in enumerate(reads, 1)
        ]
        policy = self._policy(len(reads))
        scores = ScoredAnswers(policy, mixture.rng) if policy is not None else None
        cluster = self.agents.start_cluster(
            members, lambda: self._room(layer, reads), scores, mixture.quorums[layer - 1]
        )
        self._clusters[layer, reads] = cluster
        return [f"{member.slots[0].text}" for member in members]

    def _is_scored(self, layer: int, place: int) -> bool:
        """Return whether any cluster scores an agent's answer."""
        return self._policy(self._mixture.topology.largest_cluster(layer, place)) is not None

    def _policy(self, agents: int) -> EarlyExit | None:
        """Return the early exit policy of a cluster of so many agents, if one applies."""
        policy = self._mixture.early_exit
        return policy if policy is not None and policy.applies_to(agents) else None

    async def _room(self, layer: int, reads: Reads) -> int | None:
        """Return how many tokens a cluster's answers may have for all its readers; None: any."""
        models, prompt = self._models, self._mixture.prompts[layer - 1]
        agents = zip(models[layer], self._mixture.topology.layers[layer], strict=True)
        readers = [model for model, places in agents if places == reads]
        limits = [models[layer - 1][place].max_tokens for place in reads]
        titles = [prompt.title(number) for number in range(1, len(reads) + 1)]
        # The longest role stands for all.
        role = max((reader.role for reader in readers), key=len)
        empty_prompt = add_role(prompt.messages(self._question, titles), role)
        return await room_for_answers(readers, empty_prompt, limits)
