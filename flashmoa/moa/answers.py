"""What becomes of an agent of a Mixture-of-Agents or a debate, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashmoa.engine import PromptUsage
from flashmoa.errors import FlashMoAError
from flashmoa.moa.early_exit import Quality
from flashmoa.moa.vote import Vote

Status = Literal["used", "left out", "failed"]


class MixtureFailed(FlashMoAError):
    """Raised when no answer can be made; ``__cause__`` is what one of the agents failed with."""


@dataclass(slots=True)
class Round:
    """One chunk of an answer; times in Unix seconds.

    Attributes:
        text: what it adds to the answer.
        dropped: what was written besides, and repeats the end of what was there.
        finish_reason: ``length`` where it ended with its chunk, ``stop`` where the agent took its
            answer for complete. It is asked again in the next round, as long as there is one.
        out_of_room: whether more had come to read, and had no room in the context: then this is
            the last one, and ends the answer from what had been read before.
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
        layer, place: where it stands in the topology, from 0; in a debate, its round and debater.
        status: ``used`` if whoever reads it was told it, ``left out`` if it was cancelled
            because the answers there were sufficed, ``failed`` with ``problem``.
        cut_tokens: how much of its end its readers were not shown, for lack of room.
        steps: its rounds, where it climbed a staircase; ``usage`` is then that of all requests.
    """

    layer: int
    place: int
    model: str
    engine: str
    text: str = ""
    status: Status = "used"
    problem: str = ""
    usage: PromptUsage | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cut_tokens: int = 0
    steps: list[Round] = field(default_factory=list[Round])


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a cluster went on without those still writing.

    Attributes:
        answers: how many there were, ``of`` so many agents.
        seconds: from the answer being there to the decision; what it waited for the embedder and
            for the cluster's decisions before it is in there.
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
        finish_reason: the last aggregator's, as OpenAI has it.
        layers: as in the topology.
        decisions: about leaving early, but for those that the last answer overtook.
        deciding: seconds by which decisions delayed the answer. On its critical path, that is from
            the last aggregator back through the layers, each time by way of the answer that came
            last: from that answer being there to its readers being told, whatever was waited for
            meanwhile.
    """

    text: str
    finish_reason: str | None
    layers: list[list[AgentAnswer]]
    decisions: list[Decision] = field(default_factory=list[Decision])
    deciding: float = 0.0

    @property
    def final(self) -> AgentAnswer:
        return self.layers[-1][0]


@dataclass(slots=True)
class DebateResult:
    """What a debate came to: every answer of every round, by debater, and the vote on the last
    ones or the aggregator's answer. ``finish_reason``: of the answer that ``text`` is, as OpenAI
    has it."""

    text: str
    finish_reason: str | None
    rounds: list[list[AgentAnswer]]
    vote: Vote | None = None
    aggregate: AgentAnswer | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the first request to the first token of the aggregator's answer or, where
        there is none, of the last round."""
        last = self.rounds[-1] if self.aggregate is None else [self.aggregate]
        began = [one.started for one in self.rounds[0] if one.started is not None]
        first = [one.first_token for one in last if one.first_token is not None]
        return min(first) - min(began) if first and began else None
