"""The results of mixtures, staircases and debates, and the records of their agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashmoa import FlashMoAError
from flashmoa.engine import PromptUsage
from flashmoa.moa.early_exit import Quality

Status = Literal["used", "left out", "failed"]


class MixtureFailed(FlashMoAError):
    """Raised when no answer could be made. ``__cause__`` is what one of the agents failed with."""


@dataclass(slots=True)
class StaircaseRound:
    """One chunk of an answer that was written on a staircase; times in Unix seconds.

    Attributes:
        text: what the chunk adds to the answer.
        dropped: what was written besides and left out, since it repeats the end of the answer.
        finish_reason: ``length`` if the request ended with its chunk, ``stop`` if the agent took
            its answer for complete. It is asked again in the next round, as long as there is one.
        out_of_room: whether the next chunks did not fit into the context. This round is then the
            last one; it ends the answer from the chunks that had been read before.
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
    """What one agent wrote; times in Unix seconds.

    Attributes:
        layer, place: its position in the topology, from 0; in a debate, its round and debater.
        status: ``used`` if its readers were given it, ``left out`` if it was cancelled because
            the complete answers sufficed, ``failed`` with ``problem``.
        finish_reason: as OpenAI defines it, if the agent finished.
        cut_tokens: how many tokens of its end its readers were not given, for lack of room.
        steps: its rounds, if it wrote on a staircase; ``usage`` then adds up all its requests.
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
    """Whether a cluster went on without the agents that were still writing.

    Attributes:
        answers: how many answers were complete, ``of`` so many agents.
        left: whether it did.
        seconds: from the answer's completion to the decision, including the waits for the
            embedder and for the cluster's earlier decisions.
    """

    answers: int
    of: int
    quality: Quality
    left: bool
    seconds: float


@dataclass(slots=True)
class MixtureResult:
    """One answer, and how it came about.

    Attributes:
        finish_reason: the last aggregator's, as OpenAI defines it.
        layers: every agent's answer, as in the topology.
        decisions: about early exit, except those that the cluster's last answer overtook.
        deciding: seconds by which decisions delayed the answer: the sum along its critical path
            of the time from a cluster's last answer until its readers were given it, whatever the
            wait was for. The critical path goes from the last aggregator back through the layers,
            each time by way of the answer that came last.
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
        time_to_first_token: from the question to the answer's first token, seconds.
        seconds: from the question to the answer's last token.
        tokens: how many the aggregator wrote, including those that were dropped.
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
        return sum(len(one.dropped.split()) for one in self.rounds)


@dataclass(frozen=True, slots=True)
class Vote:
    """How a debate was decided.

    Attributes:
        ballots: what was extracted from each debater's last answer; ``None`` if there was no
            answer or nothing in it.
        winner: the most common ballot; ``None`` if no answer has one.
        count: how many debaters gave it.
        place: the first debater who gave it, from 0.
    """

    ballots: tuple[str | None, ...]
    winner: str | None
    count: int
    place: int


@dataclass(slots=True)
class DebateResult:
    """The answer of a debate, and how it came about.

    Attributes:
        finish_reason: of the answer that ``text`` is, as OpenAI defines it.
        rounds: every answer of every round, by debater.
        vote: on the last round's answers, unless an aggregator concluded.
        aggregate: the aggregator's answer, if one concluded.
    """

    text: str
    finish_reason: str | None
    rounds: list[list[AgentAnswer]]
    vote: Vote | None = None
    aggregate: AgentAnswer | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from the first request to the first token of the aggregator's answer
        or, without an aggregator, of the last round."""
        last = self.rounds[-1] if self.aggregate is None else [self.aggregate]
        began = [one.started for one in self.rounds[0] if one.started is not None]
        first = [one.first_token for one in last if one.first_token is not None]
        return min(first) - min(began) if first and began else None
