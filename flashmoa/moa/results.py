"""Describe what a question's agents did (``Result``): their answers, costs and failures."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoa import FlashMoAError, UpstreamCancelled
from flashmoa.engine import PromptUsage
from flashmoa.errors import RequestRefused
from flashmoa.moa.early_exit import Decision

Status = Literal["used", "left out", "failed"]


class MixtureFailed(FlashMoAError):
    """Raised when no answer could be made. ``__cause__`` is an agent's error."""


@contextmanager
def raise_as_mixture_failed() -> Generator[None]:
    """Turn an error of the agent that writes the last answer into a :class:`MixtureFailed`."""
    try:
        yield
    except (MixtureFailed, UpstreamCancelled):
        raise
    except Exception as error:
        raise MixtureFailed(f"the last aggregator failed: {error}") from error


def describe(error: Exception) -> str:
    """Return an error's message, or its type if it has none."""
    return str(error) or type(error).__name__


def common_refusal(errors: Sequence[Exception | None]) -> RequestRefused | None:
    """Return a refusal if the requests of all agents were refused, else ``None``.

    Args:
        errors: the error of each agent; ``None`` if it has none.
    """
    causes = [error.__cause__ if isinstance(error, MixtureFailed) else error for error in errors]
    refusals = [cause for cause in causes if isinstance(cause, RequestRefused)]
    return refusals[-1] if refusals and len(refusals) == len(errors) else None


@dataclass(slots=True)
class StaircaseRound:
    """Records an agent's round on a staircase; times in Unix seconds.

    Attributes:
        text: the part of the answer that the agent wrote in this round.
        finish_reason: ``length`` if the part reached its maximal length, ``stop`` if the agent
            considered its answer complete. If there is a next round, the agent is asked again.
        out_of_room: whether this round's chunks did not fit into the context. Then this round is
            the last one, and completes the answer from the chunks of the previous rounds.
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
    """Records an agent's answer; times in Unix seconds.

    Attributes:
        layer, place: position in the topology, from 0; in a debate, the round and the debater.
        status: ``used`` if the agent's readers got the answer, ``left out`` if the agent was
            cancelled because the complete answers sufficed, ``failed`` with ``problem``.
        finish_reason: OpenAI's finish reason, if the agent finished.
        cut_tokens: number of tokens cut from its end because a reader's context was too short.
        thought: the model's thought before the answer. No other agent reads it.
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
        """Return the answer's length in tokens, or in characters if its engine did not count.

        An engine counts thought, too. Its share of the tokens is its share of the characters.
        """
        if self.usage is None:
            return len(self.text)
        everything = len(self.text) + len(self.thought)
        tokens = self.usage.completion_tokens
        return math.ceil(tokens * len(self.text) / everything) if everything else 0

    @property
    def is_complete(self) -> bool:
        """Return whether the agent has finished an answer that can be read."""
        return self.status == "used" and self.finished is not None and bool(self.text.strip())


@dataclass(frozen=True, slots=True)
class Spending:
    """Records what all agents of a question cost; partly estimated if some were cancelled."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts and answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Substitution:
    """Records what took the place of the last aggregator's answer.

    Attributes:
        kind: ``aggregator``: another aggregator answered; ``answer``: the best answer of the other
            agents is the result.
        agent: the name of the agent whose answer it is, ``LAYER.PLACE``, from 1.
        problem: why the last aggregator's answer is not used.
    """

    kind: Literal["aggregator", "answer"]
    agent: str
    problem: str


@dataclass(slots=True)
class Result:
    """The answer of a mixture, staircase or debate, and the records of its agents.

    Attributes:
        finish_reason: OpenAI's finish reason of the answer.
        tool_calls: the answer's calls of tools, as in OpenAI's messages.
        layers: every agent's answer, by layer and place; in a debate the rounds, and after them the
            aggregator's layer. Other aggregators that were asked are in the last layer.
        time_to_first_token: seconds from the question to the answer's first token.
        seconds: seconds from the question to the answer's last token.
        substitution: what took the place of the last aggregator's answer, if that failed.
        decisions: decisions about early exit, except the decisions that were cancelled because the
            cluster's last answer had arrived.
        deciding: seconds by which decisions delayed the answer: the sum, along the critical path,
            of the time from a cluster's last answer until its readers got it, for any reason. The
            critical path leads from the last aggregator back through the layers, in each layer
            through the answer that came last.
        in_one_request_for: parameters that made every agent of a staircase write its answer in one
            request, from whole answers.
    """

    text: str
    finish_reason: str | None
    layers: list[list[AgentAnswer]]
    spending: Spending = Spending(0, 0)
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    substitution: Substitution | None = None
    decisions: list[Decision] = field(default_factory=list[Decision])
    deciding: float = 0.0
    in_one_request_for: Sequence[str] = ()
    tool_calls: Sequence[dict[str, Any]] = ()

    @property
    def agents(self) -> list[AgentAnswer]:
        """Return every agent's record."""
        return [agent for layer in self.layers for agent in layer]

    @property
    def final(self) -> AgentAnswer:
        """Return the record of the agent whose answer is the result."""
        if self.substitution is not None:
            name = self.substitution.agent
            return next(agent for agent in self.agents if agent.name == name)
        return self.layers[-1][0]
