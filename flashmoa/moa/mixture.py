"""Mixture-of-Agents on self-hosted engines: what users call."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from flashmoa.linking.link import Ahead
from flashmoa.moa.agents import Times
from flashmoa.moa.answers import MixtureResult
from flashmoa.moa.early_exit import EarlyExit
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt, Question, conversation
from flashmoa.moa.running import Running
from flashmoa.moa.topology import Topology
from flashmoa.observe import Listener, both, contained, ignore
from flashmoa.workflow import Workflow


class MixtureOfAgents:
    """Proposers answer a question, and layers of aggregators make one answer of theirs.

    While agents write, their answers flow into the prompts of those who will read them
    (Faster-MoA §4.3), and with ``early_exit`` agents that are not needed any more are cancelled
    (§4.2). Answers that fail or are empty are left out; answers for which there is no room are
    cut, the longest first. Both is said in the result.

    Args:
        layers: the models, the proposers' first, the last aggregator's last.
        topology: who reads whom: a :class:`Topology`, ``9-3-1`` for a tree, ``9x9x1`` for
            all-to-all. By default a tree of the layers' widths.
        prompt: what aggregators are told.
        early_exit: applies to every cluster that is read, whatever its layer.
        ahead: of aggregators' prompts, what is prefilled before their requests; to compare with.
        stall_seconds: an agent that pauses for so long, once it has begun, is left out.
        listener: is told everything that happens; agents are called ``LAYER.PLACE``, from 1.

    Raises: ValueError where layers and topology do not go together.
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
            raise ValueError(f"there are {widths} models for a topology of {topology.widths}")
        self.topology = topology
        self.models = layers
        self.prompt = prompt or AggregationPrompt()
        self.early_exit = early_exit
        self.ahead: Ahead = ahead
        self.stall_seconds = stall_seconds
        self.listener = contained(listener)
        self.coin = random.Random(early_exit.seed if early_exit is not None else 0)

    async def answer(self, question: Question) -> MixtureResult:
        """The answer, when it is complete.

        Args:
            question: a text, or messages of which the last is a user's.

        Raises:
            ValueError: nobody is asked anything.
            MixtureFailed: no agent of a cluster, or not the last aggregator, could answer.
        """
        async with self.answering(question) as running:
            return await running.result()

    @asynccontextmanager
    async def answering(self, question: Question) -> AsyncGenerator[Running]:
        """The answer as it is written; leaving the context ends every agent that still writes.

        Raises: as :meth:`answer`.
        """
        times = Times()
        flow = Workflow(
            self.models[-1][0].engine, ahead=self.ahead, listener=both(self.listener, times)
        )
        async with flow:
            running = Running(self, flow, conversation(question), times)
            try:
                yield running
            finally:
                running.cancel()
