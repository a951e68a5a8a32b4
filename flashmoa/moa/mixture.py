"""Mixture-of-Agents (Faster-MoA, arXiv 2512.18126), and staircases (arXiv 2510.05059)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from flashmoa.moa.early_exit import EarlyExit
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt
from flashmoa.moa.run import System, SystemSettings
from flashmoa.moa.settings import Quorum, Steps, check_quorums
from flashmoa.moa.topology import Topology


class MixtureOfAgents(System):
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
        settings: see :class:`flashmoa.moa.run.SystemSettings`.

    Raises: ValueError if the layers do not match the topology, or the prompts or quorums the
        layers, or if a quorum needs more answers than are read together.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Model]],
        topology: Topology | str | None = None,
        *,
        prompt: AggregationPrompt | Sequence[AggregationPrompt] | None = None,
        early_exit: EarlyExit | None = None,
        quorum: Quorum | Sequence[Quorum | None] | None = None,
        **settings: Unpack[SystemSettings],
    ) -> None:
        widths = tuple(len(layer) for layer in layers)
        self.topology = Topology.of(widths, topology)
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
        reads = self.topology.layers
        check_quorums(quorum, [[len(one) for one in layer] for layer in reads[1:]])
        self.prompts = prompt
        super().__init__(layers, reads, quorum, settings, early_exit=early_exit)

    def prompt(self, layer: int, place: int) -> AggregationPrompt:
        """Return the prompt of a layer."""
        return self.prompts[layer - 1]


class Staircase(System):
    """Runs a layer of proposers, and an aggregator that writes while they do, in rounds.

    In each round, the next chunk of every proposer's answer is added to the aggregator's prompt,
    and the aggregator writes a part of its own answer from the chunks so far. Its first token waits
    for the proposers' first chunks, and not for their whole answers.

    Args:
        aggregator: if it has parameters that one request must follow to the answer's end, or gets
            them with a question, it waits for whole answers and writes in one request
            (``in_one_request_for`` of the result). So do other aggregators in its place.
        prompt: the aggregator's prompt. With the order ``rounds`` its layout should be
            ``question-first``, the default, since only the end of a prompt can grow.
        steps: the chunks in which it reads, and their order in its prompt.
        quorum: how many proposers suffice after some time: to begin with, and in the end.
        settings: see :class:`flashmoa.moa.run.SystemSettings`.

    Raises: ValueError if there are no proposers, or fewer than the quorum needs.
    """

    def __init__(
        self,
        proposers: Sequence[Model],
        aggregator: Model,
        *,
        prompt: AggregationPrompt | None = None,
        steps: Steps | None = None,
        quorum: Quorum | None = None,
        **settings: Unpack[SystemSettings],
    ) -> None:
        if not proposers:
            raise ValueError("a staircase needs at least one proposer; there is none")
        check_quorums([quorum], [[len(proposers)]])
        self._prompt = prompt or AggregationPrompt("question-first")
        layers, reads = [proposers, [aggregator]], Topology.dense(len(proposers), 1).layers
        super().__init__(layers, reads, [quorum], settings, steps=steps or Steps())

    def prompt(self, layer: int, place: int) -> AggregationPrompt:
        """Return the aggregator's prompt."""
        return self._prompt
