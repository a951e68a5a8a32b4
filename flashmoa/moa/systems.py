"""Define the kinds of systems: mixtures of agents, staircases and debates.

See Faster-MoA (arXiv 2512.18126), Staircase Streaming (arXiv 2510.05059), and for debates Du et al.
2023 (arXiv 2305.14325).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from flashmoa.moa.early_exit import EarlyExit
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt, AnswerForms, DebatePrompt, Messages
from flashmoa.moa.run import Slots, System, SystemSettings
from flashmoa.moa.settings import Quorum, Steps
from flashmoa.moa.topology import Reads, Topology


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
        self.prompts = prompt
        reads = self.topology.layers
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
        self._prompt = prompt or AggregationPrompt("question-first")
        layers, reads = [proposers, [aggregator]], Topology.dense(len(proposers), 1).layers
        super().__init__(layers, reads, [quorum], settings, steps=steps or Steps())

    def prompt(self, layer: int, place: int) -> AggregationPrompt:
        """Return the aggregator's prompt."""
        return self._prompt


class Debate(System):
    """Lets debaters answer a question in rounds (Du et al. 2023, arXiv 2305.14325).

    In the first round each debater answers alone. In every later round it reads the answers that
    all debaters gave in the round before. While answers are written, they flow into the prompts of
    the next round. Answers that fail or are empty are left out. Answers that do not fit into a
    reader's context are cut, the longest first. The result's records show both.

    Args:
        debaters: at least two models.
        rounds: how often each debater answers.
        aggregator: reads the last round's answers and writes the result.
        prompt: the debaters' prompt.
        staircase: settings with which debaters, and an aggregator, begin when all debaters have
            written a chunk in the round before, and continue chunk by chunk. By default they wait
            for whole answers, and so they do for parameters that need one request
            (``in_one_request_for`` of the result).
        quorum: how many answers of a round suffice after some time; ``None``: all are waited for.
        settings: see :class:`flashmoa.moa.run.SystemSettings`.

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
        self.rounds = rounds
        self._prompt = prompt or DebatePrompt()
        everyone: Reads = tuple(range(len(debaters)))
        layers = [*[debaters] * rounds, [aggregator]]
        reads = [[()] * len(debaters), *[[everyone] * len(debaters)] * (rounds - 1), [everyone]]
        super().__init__(layers, reads, [quorum] * rounds, settings, steps=staircase)

    def prompt(self, layer: int, place: int) -> AggregationPrompt:
        """Return the aggregator's prompt, or that of a debater on a staircase."""
        if layer == self.rounds:
            return self._prompt.aggregation
        return self._prompt.on_staircase(place)

    def forms(self, layer: int, reads: Reads) -> list[list[tuple[str, str]]]:
        """Return an answer's forms in the prompts of its debater, and of the others."""
        if layer == self.rounds:
            return super().forms(layer, reads)
        prompt = self._prompt
        return [[("", prompt.absent), (prompt.title(place + 1), "")] for place in reads]

    def messages(self, question: Messages, layer: int, place: int, slots: Slots) -> Messages:
        """Return the messages of a debater, with earlier rounds, or of the aggregator."""
        if layer == self.rounds:
            return super().messages(question, layer, place, slots)
        reads = self.reads[layer][place]
        rounds = [[AnswerForms(*forms) for forms in each[reads]] for each in slots]
        return self._prompt.messages(question, place, rounds)

    def depth(self, layer: int) -> int:
        """Return how many rounds the longest prompt has that has those of a layer's."""
        if layer == self.rounds or self._prompt.memory == "last":
            return 1
        return self.rounds - 1
