"""Results of mixtures, staircases and debates, with the records of their agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flashmoa import FlashMoAError
from flashmoa.engine import PromptUsage
from flashmoa.moa.early_exit import Quality
from flashmoa.moa.prompts import count_visible

Status = Literal["used", "left out", "failed"]


class MixtureFailed(FlashMoAError):
    """Raised when no answer could be made. ``__cause__`` is the error of one of the agents."""


@dataclass(slots=True)
class StaircaseRound:
    """Records one round of an agent on a staircase; times in Unix seconds.

    Attributes:
        text: the part of the answer that was written in this round.
        finish_reason: ``length`` if the part reached its maximal length, ``stop`` if the agent
            considered its answer complete. If there is a next round, it is asked again.
        out_of_room: whether this round's chunks did not fit into the context. Then this round is
            the last one, and completes the answer from the chunks of the rounds before.
    """

    asked: float
    first_token: float | None = None
    finished: float | None = None
    text: str = ""
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
        thought: what the model thought before it answered, which is in no prompt of another agent.
        confidence: geometric mean of its tokens' probabilities, if they were requested.
        retries: the problems of requests that were repeated; ``usage`` then adds up all requests.
        steps: the agent's rounds on a staircase; ``usage`` then adds up all its requests.
    """

    layer: int
    place: int
    model: str
    engine: str = ""
    text: str = ""
    status: Status = "used"
    problem: str = ""
    usage: PromptUsage | None = None
    finish_reason: str | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cut_tokens: int = 0
    thought: str = ""
    confidence: float | None = None
    retries: list[str] = field(default_factory=list[str])
    steps: list[StaircaseRound] = field(default_factory=list[StaircaseRound])

    @property
    def name(self) -> str:
        """Return its name in events: ``LAYER.PLACE``, from 1."""
        return f"{self.layer + 1}.{self.place + 1}"

    @property
    def tokens(self) -> int:
        """Return the answer's length in tokens, as :func:`count_visible`."""
        return count_visible(self.usage, self.text, self.thought)

    @property
    def is_complete(self) -> bool:
        """Return whether the agent has finished an answer that can be read."""
        return self.status == "used" and self.finished is not None and bool(self.text.strip())


@dataclass(frozen=True, slots=True)
class Spending:
    """Records what a question cost, all agents together; partly estimated if some were cancelled.

    Attributes:
        tokens_left: what is left of the budget; ``None`` without one.
    """

    prompt_tokens: int
    completion_tokens: int
    tokens_left: int | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts and answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Substitution:
    """Records what took the place of the last aggregator's answer.

    Attributes:
        kind: ``aggregator``: another aggregator answered; ``answer``: the best answer that there
            was is the result.
        agent: the name of the agent whose answer it is, ``LAYER.PLACE``, from 1.
        problem: why the last aggregator's answer is not used.
    """

    kind: Literal["aggregator", "answer"]
    agent: str
    problem: str


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
        spending: what the question cost.
        substitution: what took the place of the last aggregator's answer, if that failed.
    """

    text: str
    finish_reason: str | None
    layers: list[list[AgentAnswer]]
    decisions: list[Decision] = field(default_factory=list[Decision])
    deciding: float = 0.0
    spending: Spending = Spending(0, 0)
    substitution: Substitution | None = None

    @property
    def agents(self) -> list[AgentAnswer]:
        """Return every agent's record."""
        return [agent for layer in self.layers for agent in layer]

    @property
    def final(self) -> AgentAnswer:
        """Return the record of the agent whose answer is the result."""
        return find_author(self.agents, self.substitution) or self.layers[-1][0]


def find_author(
    agents: Sequence[AgentAnswer], substitution: Substitution | None
) -> AgentAnswer | None:
    """Return the agent that a substitution names; ``None`` without a substitution."""
    if substitution is None:
        return None
    return next(agent for agent in agents if agent.name == substitution.agent)


@dataclass(slots=True)
class StaircaseResult:
    """The answer of a staircase, its proposers' answers and its rounds.

    Attributes:
        finish_reason: finish reason of the answer in OpenAI's sense.
        agents: the proposers' records, the aggregator's, and those of aggregators after it.
        spending, substitution: as of :class:`MixtureResult`.
        time_to_first_token: seconds from the question to the answer's first token.
        seconds: seconds from the question to the answer's last token.
        tokens: number of tokens that the aggregator wrote.
        in_one_request_for: parameters for which the aggregator wrote its answer in one request,
            from whole answers. Then there are no rounds.
    """

    text: str
    proposals: list[str]
    rounds: list[StaircaseRound] = field(default_factory=list[StaircaseRound])
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    finish_reason: str | None = None
    agents: list[AgentAnswer] = field(default_factory=list[AgentAnswer])
    spending: Spending = Spending(0, 0)
    substitution: Substitution | None = None
    in_one_request_for: Sequence[str] = ()

    @property
    def tokens_per_second(self) -> float:
        """Return the aggregator's tokens per second of ``seconds``."""
        return self.tokens / self.seconds if self.seconds else 0.0


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
        more_aggregates: the answers of the aggregators that were asked after it had failed.
        spending: as of :class:`MixtureResult`.
        substitution: what took the place of the aggregator's answer, if that failed, or of the last
            round's, if there was none to vote on.
        in_one_request_for: on a staircase, parameters for which every agent wrote its answer in one
            request, from whole answers.
    """

    text: str
    finish_reason: str | None
    rounds: list[list[AgentAnswer]]
    vote: Vote | None = None
    aggregate: AgentAnswer | None = None
    more_aggregates: list[AgentAnswer] = field(default_factory=list[AgentAnswer])
    spending: Spending = Spending(0, 0)
    substitution: Substitution | None = None
    in_one_request_for: Sequence[str] = ()

    @property
    def agents(self) -> list[AgentAnswer]:
        """Return every agent's record."""
        aggregates = [] if self.aggregate is None else [self.aggregate]
        debaters = [agent for round_ in self.rounds for agent in round_]
        return [*debaters, *aggregates, *self.more_aggregates]

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from the first request to the answer's first token.

        After a vote, it is the first token of the last round.
        """
        last = self.rounds[-1] if self.aggregate is None else [self.aggregate]
        starts = [record.started for record in self.rounds[0] if record.started is not None]
        first = [record.first_token for record in last if record.first_token is not None]
        return min(first) - min(starts) if first and starts else None
