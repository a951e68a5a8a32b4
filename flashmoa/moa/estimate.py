"""Estimate what a question costs a configured mixture, before it is asked (``estimate``); pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoa.engine import PromptUsage
from flashmoa.moa.config import MixtureConfig, ModelConfig
from flashmoa.moa.topology import Reads, Topology

# Tokens of an aggregator's instruction, and of a title and a chat template around each answer.
_INSTRUCTION_TOKENS = 80
_TITLE_TOKENS = 8
_TEMPLATE_TOKENS = 20


@dataclass(frozen=True, slots=True)
class AgentEstimate:
    """What one agent is expected to cost.

    Attributes:
        name: ``LAYER.PLACE``, from 1; in a debate ``ROUND.PLACE``.
        seconds: time from its request to its last token, alone on its engine and with nothing
            prefilled before; ``None`` if the model has no ``speed``.
        price: ``None`` if the model has no ``price``.
    """

    name: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float | None
    price: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one question is expected to cost.

    It is an upper bound if answers have at most ``answer_tokens``, or their ``max_tokens``: nothing
    is left out, nothing fails, and nothing is cached. A staircase sends more requests, of which
    engines compute the new tokens only; they are not counted here.

    Attributes:
        seconds: time along the slowest path; ``None`` if a model has no ``speed``. Agents that wait
            for each other on one engine take longer, and links take time away.
    """

    agents: Sequence[AgentEstimate]
    seconds: float | None

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(agent.prompt_tokens for agent in self.agents)

    @property
    def completion_tokens(self) -> int:
        """Return the tokens of all answers."""
        return sum(agent.completion_tokens for agent in self.agents)

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def price(self) -> float | None:
        """Return the price of all agents; ``None`` if one has none."""
        prices = [agent.price for agent in self.agents]
        return sum(price for price in prices if price is not None) if None not in prices else None

    def __str__(self) -> str:
        """Return a table for people."""
        rows = [
            (one.name, one.model, one.prompt_tokens, one.completion_tokens, one.seconds, one.price)
            for one in self.agents
        ]
        rows.append(
            ("all", "", self.prompt_tokens, self.completion_tokens, self.seconds, self.price)
        )
        titles = ("prompt", "answer", "seconds", "price")
        lines = [f"{'agent':<6} {'model':<32} " + " ".join(f"{title:>8}" for title in titles)]
        lines += [
            f"{name:<6} {model:<32} {prompt:>8,} {answer:>8,} {_number(seconds, 1):>8} "
            f"{_number(price, 6):>8}"
            for name, model, prompt, answer, seconds, price in rows
        ]
        return "\n".join(lines)


def estimate(
    config: MixtureConfig, question_tokens: int = 200, answer_tokens: int = 512
) -> Estimate:
    """Estimate what one question costs.

    Args:
        answer_tokens: length of an answer, unless its model has a smaller ``max_tokens``.

    Raises: ValueError if the layers do not match the topology.
    """
    layers, reads = agents_by_layer(config), _reads(config)
    agents: list[AgentEstimate] = []
    # For each agent of the layer before: the length of its answer, and when it is complete.
    before: list[tuple[int, float | None]] = []
    for number, (models, places) in enumerate(zip(layers, reads, strict=True)):
        layer: list[tuple[int, float | None]] = []
        for place, (model, read) in enumerate(zip(models, places, strict=True)):
            name = f"{number + 1}.{place + 1}"
            history = question_tokens
            # An aggregator, and everybody on a staircase, reads the round before only.
            reads_all = config.debate.memory == "all" and not config.overlaps
            if config.kind == "debate" and reads_all and number < config.debate.rounds:
                history += max(0, number - 1) * sum(length for length, _ in before)
            prompt = history + _TEMPLATE_TOKENS + sum(before[one][0] for one in read)
            prompt += (_INSTRUCTION_TOKENS + _TITLE_TOKENS * len(read)) if read else 0
            agent = _estimate_agent(name, model, prompt, answer_tokens)
            agents.append(agent)
            layer.append(
                (agent.completion_tokens, _add(agent.seconds, [before[one][1] for one in read]))
            )
        before = layer
    return Estimate(agents, _latest([end for _, end in before]))


def agents_by_layer(config: MixtureConfig) -> list[list[ModelConfig]]:
    """Return the model of each agent, by layer; in a debate, by round."""
    layers = [[one for one in layer.models for _ in range(one.repeat)] for layer in config.layers]
    rounds = config.debate.rounds if config.kind == "debate" else 1
    return [layers[0]] * rounds + layers[1:]


def _reads(config: MixtureConfig) -> list[Sequence[Reads]]:
    """Return for each agent, by layer, the places of those that it reads."""
    layers = agents_by_layer(config)
    if config.kind != "mixture":
        everyone = tuple(range(len(layers[0])))
        return [[()] * len(layers[0]), *([everyone] * len(layer) for layer in layers[1:])]
    widths = [len(layer) for layer in layers]
    return [*Topology.of(widths, config.topology).layers]


def _estimate_agent(
    name: str, model: ModelConfig, prompt: int, answer_tokens: int
) -> AgentEstimate:
    sampling = model.sampling
    limit = sampling.get("max_completion_tokens") or sampling.get("max_tokens")
    answer = min(answer_tokens, limit) if limit else answer_tokens
    usage = PromptUsage(prompt_tokens=prompt, completion_tokens=answer)
    seconds = None
    if model.speed is not None:
        seconds = prompt / model.speed.prefill + answer / model.speed.decode
    price = None if model.price is None else model.price.of(usage)
    return AgentEstimate(name, model.model, prompt, answer, seconds, price)


def _add(seconds: float | None, earlier: Sequence[float | None]) -> float | None:
    """Return when an agent ends that begins after the others; ``None`` if that is unknown."""
    start = _latest(earlier)
    return None if seconds is None or start is None else seconds + start


def _latest(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known, default=0.0) if len(known) == len(times) else None


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"
