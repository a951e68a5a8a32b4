"""Results of mixtures, staircases and debates, with the records of their agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashmoa import FlashMoAError
from flashmoa.engine import PromptUsage
from flashmoa.moa.early_exit import Quality

Status = Literal["used", "left out", "failed"]


class MixtureFailed(FlashMoAError):
    """Raised when no answer could be made. ``__cause__`` is the error of one of the agents."""


@dataclass(slots=True)
class StaircaseRound:
    """Records one round of an agent on a staircase; times in Unix seconds.

    Attributes:
        text: the part of the answer that was written in this round.
        dropped: text that was dropped since it repeated the end of the answer so far.
        finish_reason: ``length`` if the part reached its maximal length, ``stop`` if the agent
            considered its answer complete. If there is a next round, it is asked again.
        out_of_room: whether this round's chunks did not fit into the context. Then this round is
            the last one, and completes the answer from the chunks of the rounds before.
    """

    asked: float
    first_token: float | None = None
    finished: float | None = None
    text: str = ""
    dropped: str = ""
    usage: PromptUsage | None = None
    finish_reason: str | None = None
    out_of_room: bool = False


@dataclass(slots=True)
class AgentAnswer:
    """Records the answer of one agent; times in Unix seconds.

    Attributes:
        layer, place: position in the topology, from 0; in a debate, the round and the debater.
        status: ``used`` if the agent's readers got the answer, ``left out`` if the agent was
            cancelled because the complete answers sufficed, ``failed`` with ``problem``.
        finish_reason: finish reason in OpenAI's sense, if the agent finished.
        cut_tokens: how many tokens were cut from its end because readers' contexts were too short.
        steps: the agent's rounds on a staircase; ``usage`` then adds up all its requests.
    """

    layer: int
    place: int
    model: str
    engine: str
    text: str = ""
    status: Status = "used"
    problem: str = ""
    usage: PromptUsage | None = None
    finish_reason: str | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cut_tokens: int = 0
    steps: list[StaircaseRound] = field(default_factory=list[StaircaseRound])


@dataclass(frozen=True, slots=True)
class Decision:
    """Records whether a cluster continued without the agents that were still writing.

    Attributes:
        answers: number of answers that were complete.
        of: number of agents in the cluster.
        left: whether it continued without the others.
        seconds: time from the answer's completion to the decision, including the waits for the
            embedder and for the cluster's earlier decisions.
    """

    answers: int
    of: int
    quality: Quality
    left: bool
    seconds: float


@dataclass(slots=True)
class MixtureResult:
    """The answer of a mixture, and the records of its agents and decisions.

    Attributes:
        finish_reason: the last aggregator's finish reason in OpenAI's sense.
        layers: every agent's answer, by layer and place.
        decisions: decisions about early exit, except those that were cancelled because the
            cluster's last answer had arrived.
        deciding: seconds by which decisions delayed the answer: the sum along the critical path
            of the time from a cluster's last answer until its readers got it, for whatever reason.
            The critical path leads from the last aggregator back through the layers, in each layer
            through the answer that came last.
    """

    text: str
    finish_reason: str | None
    layers: list[list[AgentAnswer]]
    decisions: list[Decision] = field(default_factory=list[Decision])
    deciding: float = 0.0

    @property
    def final(self) -> AgentAnswer:
        """Return the last aggregator's answer."""
        return self.layers[-1][0]


@dataclass(slots=True)
class StaircaseResult:
    """The answer of a staircase, its proposers' answers and its rounds.

    Attributes:
        time_to_first_token: seconds from the question to the answer's first token.
        seconds: seconds from the question to the answer's last token.
        tokens: number of tokens that the aggregator wrote, including dropped ones.
    """

    text: str
    proposals: list[str]
    rounds: list[StaircaseRound] = field(default_factory=list[StaircaseRound])
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Return the aggregator's tokens per second of ``seconds``."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def dropped_words(self) -> int:
        """Return how many words were left out because they repeated the end of the answer."""
        return sum(len(round_.dropped.split()) for round_ in self.rounds)


@dataclass(frozen=True, slots=True)
class Vote:
    """The outcome of a vote.

    Attributes:
        ballots: the ballot in each debater's last answer; ``None`` if it has none or is empty.
        winner: the most common ballot; ``None`` if there is no ballot.
        count: number of debaters with that ballot.
        place: the first debater with that ballot, from 0.
    """

    ballots: tuple[str | None, ...]
    winner: str | None
    count: int
    place: int


@dataclass(slots=True)
class DebateResult:
    """The answer of a debate, and the records of its agents.

    Attributes:
        text: the answer that won the vote, or the aggregator's.
        finish_reason: finish reason of that answer in OpenAI's sense.
        rounds: every answer of every round, by debater.
        vote: the vote on the last round's answers; ``None`` if an aggregator concluded.
        aggregate: the aggregator's answer, if one concluded.
    """

    text: str
    finish_reason: str | None
    rounds: list[list[AgentAnswer]]
    vote: Vote | None = None
    aggregate: AgentAnswer | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from the first request to the answer's first token.

        After a vote, it is the first token of the last round.
        """
        last = self.rounds[-1] if self.aggregate is None else [self.aggregate]
        starts = [record.started for record in self.rounds[0] if record.started is not None]
        first = [record.first_token for record in last if record.first_token is not None]
        return min(first) - min(starts) if first and starts else None
