"""Define mixtures of agents, staircases and debates: their topologies and prompts.

See Faster-MoA (arXiv 2512.18126), Staircase Streaming (arXiv 2510.05059), and for debates Du et al.
2023 (arXiv 2305.14325). In all of them, an answer that fails or is empty is left out. If answers do
not fit into a reader's context, the longest are cut first. The result's records show both.
:class:`flashmoa.moa.run.SystemSettings` are their common settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from flashmoa.moa.early_exit import EarlyExit
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt, DebatePrompt
from flashmoa.moa.run import System, SystemSettings
from flashmoa.moa.settings import Quorum, Steps
from flashmoa.moa.topology import Topology


class MixtureOfAgents(System):
    """Lets proposers answer a question, and layers of aggregators combine their answers into one.

    While agents write, their answers flow into the prompts of their readers (Faster-MoA §4.3).

    Args:
        layers: the models, from the proposers' layer to the last aggregator's.
        topology: which agents read which: a :class:`Topology`, ``9-3-1`` for a tree or ``9x9x1``
            for all-to-all. The default is a tree of the layers' widths.
        prompt: the aggregators' prompt, or a prompt for each layer after the first.
        early_exit: cancels agents that are no longer needed (§4.2), in clusters of any layer.
        quorum: how many answers of a cluster suffice after some time, or one such setting for each
            layer but the last.

    Raises: ValueError if the layers do not match the topology, or the prompts or quorums the
        layers.
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
        self.topology = Topology.of([len(layer) for layer in layers], topology)
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
        super().__init__(
            layers, self.topology, prompt, quorum, settings=settings, early_exit=early_exit
        )


class Staircase(System):
    """Runs proposers, and an aggregator that writes in rounds while they write.

    Each round adds the next chunk of every proposer's answer to the aggregator's prompt, and the
    aggregator writes the next part of its own answer. Its first token waits for the proposers'
    first chunks only.

    Args:
        aggregator: if one of its parameters needs one request for the whole answer, it waits for
            whole answers and writes in one request (``in_one_request_for`` of the result). The
            same holds for parameters of the question, and for other aggregators in its place.
        prompt: the aggregator's prompt. With the order ``prefix-cached`` its layout should
            be ``question-first``, the default, since only the end of a prompt can grow.
        quorum: how many proposers suffice after some time: to begin with, and in the end.

    Raises: ValueError if there are no proposers.
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
        super().__init__(
            [proposers, [aggregator]],
            Topology.dense(len(proposers), 1),
            [prompt or AggregationPrompt()],
            [quorum],
            settings=settings,
            steps=steps or Steps(),
        )


class Debate(System):
    """Lets debaters answer a question in rounds (Du et al. 2023, arXiv 2305.14325).

    In the first round each debater answers alone. In every later round it reads the answers that
    all debaters gave in the round before. While debaters write, their answers flow into the prompts
    of the next round.

    Args:
        debaters: at least two models.
        rounds: how often each debater answers.
        aggregator: reads the answers of the last round and writes the result.
        staircase: the chunks that debaters and the aggregator read while other debaters write. By
            default they wait for whole answers. If a parameter needs one request, they always wait
            (``in_one_request_for`` of the result).
        quorum: how many answers of a round suffice after some time.

    Raises: ValueError if there are fewer than two debaters, or no round.
    """

    def __init__(
        self,
        debaters: Sequence[Model],
        rounds: int,
        aggregator: Model,
        *,
        prompt: DebatePrompt | None = None,
        staircase: Steps | None = None,
        quorum: Quorum | None = None,
        **settings: Unpack[SystemSettings],
    ) -> None:
        if len(debaters) < 2:
            raise ValueError(f"a debate needs at least two debaters; there are {len(debaters)}")
        if rounds < 1:
            raise ValueError(f"a debate needs at least one round; rounds is {rounds}")
        prompt = prompt or DebatePrompt()
        super().__init__(
            [*[debaters] * rounds, [aggregator]],
            Topology.dense(*[len(debaters)] * rounds, 1),
            [*[prompt] * (rounds - 1), prompt.aggregation],
            [quorum] * rounds,
            settings=settings,
            steps=staircase,
        )
