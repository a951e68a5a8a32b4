"""Let several models answer, read each other's answers and answer again (``Debate``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from flashmoa.moa.final_answer import Extract
from flashmoa.moa.models import Model
from flashmoa.moa.prompts import AggregationPrompt, AnswerForms, DebatePrompt, Messages
from flashmoa.moa.run import Slots, System, SystemSettings
from flashmoa.moa.settings import Quorum, Steps, check_quorums
from flashmoa.moa.topology import Reads


class Debate(System):
    """Lets debaters answer a question in rounds (Du et al. 2023, arXiv 2305.14325).

    In the first round each debater answers alone. In every later round it reads the answers that
    all debaters gave in the round before. While answers are written, they flow into the prompts of
    the next round. Answers that fail or are empty are left out. Answers that do not fit into a
    reader's context are cut, the longest first. The result's records show both.

    Args:
        debaters: at least two models.
        rounds: how often each debater answers.
        conclusion: a function or a model that concludes from the last round's answers. A function
            returns the ballot of each answer, or ``None``. The most common ballot wins; in a tie,
            that of the first debater. A model reads all answers and writes its own, as the last
            aggregator of a Mixture-of-Agents does.
        prompt: the debaters' prompt.
        staircase: settings with which debaters, and an aggregator, begin when all debaters have
            written a chunk in the round before, and continue chunk by chunk. By default they wait
            for whole answers, and so they do for parameters that need one request
            (``in_one_request_for`` of the result).
        quorum: how many answers of a round suffice after some time; ``None``: all are waited for.
        settings: see :class:`flashmoa.moa.run.SystemSettings`.

    Raises: ValueError if there are fewer than two debaters, no round, or a quorum of more debaters.
    """

    def __init__(
        self,
        debaters: Sequence[Model],
        rounds: int,
        conclusion: Extract | Model,
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
        check_quorums([quorum], [[len(debaters)]])
        self.rounds = rounds
        self._prompt = prompt or DebatePrompt()
        everyone: Reads = tuple(range(len(debaters)))
        layers: list[Sequence[Model]] = [debaters] * rounds
        reads: list[list[Reads]] = [[()] * len(debaters)]
        reads += [[everyone] * len(debaters)] * (rounds - 1)
        extract: Extract | None = None
        if isinstance(conclusion, Model):
            layers.append([conclusion])
            reads.append([everyone])
        else:
            extract = conclusion
        quorums = [quorum] * rounds
        super().__init__(layers, reads, quorums, settings, steps=staircase, extract=extract)

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
