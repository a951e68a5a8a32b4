"""Write the script of a question: how long each agent's answer is, and how they are scored; pure.

Answers of engines on modelled GPUs mean nothing and have no end of their own. So their lengths and
similarities are those of recorded answers to one question, and their confidences are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flashmoa_bench.recorded import SIZES, RecordedQuestion

# How narrowly drawn confidences lie around their mean: the sum of the parameters of a beta
# distribution, whose standard deviation is then 0.05 around 0.85.
_CONCENTRATION = 50.0


@dataclass(frozen=True, slots=True)
class AgentScript:
    """One agent's answer.

    Attributes:
        size: size of its model.
        draw: which of the recorded answers of this size it stands for.
        tokens: its length.
        confidence: geometric mean of its tokens' probabilities.
    """

    size: str
    draw: int
    tokens: int
    confidence: float


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """How scripts are made.

    Attributes:
        scale: factor of all lengths.
        longest: most tokens of an answer, after scaling.
        equal: tokens of every answer, in place of the recorded ones; ``None``: as recorded.
        prompt: least and most tokens of the question, drawn evenly; ``None``: as recorded.
        later: tokens of every answer after the first layer's; ``None``: as of answers of their
            sizes.
        last: tokens of the last agent's answer; ``None``: as ``later``.
        confidence: mean of the confidences.
    """

    scale: float = 1.0
    longest: int = 1024
    equal: int | None = None
    prompt: tuple[int, int] | None = None
    later: int | None = None
    last: int | None = None
    confidence: float = 0.85
    seed: int = 0


@dataclass(frozen=True, slots=True)
class QuestionScript:
    """A question, and how its answers are written.

    Attributes:
        question: whose recorded answers these are.
        prompt: tokens of the question.
        agents: the agents by name, ``LAYER.PLACE``, both counted from 1.
    """

    question: RecordedQuestion
    prompt: int
    agents: Mapping[str, AgentScript] = field(default_factory=dict[str, AgentScript])

    def similarity(self, one: str, other: str) -> float:
        """Return how similar the answers of two agents are, in [0, 1]."""
        first, last = self.agents[one], self.agents[other]
        return self.question.similarity((first.size, first.draw), (last.size, last.draw))


def write_script(
    question: RecordedQuestion, layers: Sequence[Sequence[str]], options: ScriptOptions
) -> QuestionScript:
    """Return the script of a question.

    An agent's answer is as long as a recorded one of its size: the first proposer of a size stands
    for the first model of that size, and so on. Answers of aggregators are not recorded; they are
    taken to be as long as answers of their size. The same question has the same confidences by
    agent, whatever the layers are.

    Args:
        layers: the size of each agent, by layer.
    """
    agents: dict[str, AgentScript] = {}
    for layer, sizes in enumerate(layers):
        # Each layer begins with another draw, so that it does not repeat the one before.
        counts: dict[str, int] = dict.fromkeys(SIZES, layer)
        for place, size in enumerate(sizes):
            name = f"{layer + 1}.{place + 1}"
            tokens = options.equal or round(question.length(size, counts[size]) * options.scale)
            if layer:
                tokens = options.later or tokens
            if layer == len(layers) - 1:
                tokens = options.last or tokens
            tokens = max(1, min(tokens, options.longest))
            confidence = _draw_confidence(question, name, options)
            agents[name] = AgentScript(size, counts[size], tokens, confidence)
            counts[size] += 1
    return QuestionScript(question, _count_prompt(question, options), agents)


def _draw_confidence(question: RecordedQuestion, agent: str, options: ScriptOptions) -> float:
    dice = random.Random(f"{options.seed} {question.number} {agent}")
    mean = options.confidence
    return dice.betavariate(mean * _CONCENTRATION, (1 - mean) * _CONCENTRATION)


def _count_prompt(question: RecordedQuestion, options: ScriptOptions) -> int:
    if options.prompt is None:
        return max(1, round(question.prompt * options.scale))
    return random.Random(f"{options.seed} {question.number}").randint(*options.prompt)
