"""Count the prompt tokens of one question's agents, by how they were computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flashmoa.engine import PromptUsage
from flashmoa.observe import CallFinished, Event


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Counts prompt tokens: ``prompt = streamed + cached + late``.

    Attributes:
        prompt: all prompt tokens.
        streamed: tokens that the request's own prompt stream computed before the request came.
        cached: tokens that other requests and streams left in the engine's radix cache.
        late: tokens computed after the request came.

    Counts that the engine does not report are ``None``.
    """

    prompt: float
    streamed: float | None
    cached: float | None
    late: float | None

    @classmethod
    def from_usage(cls, usage: PromptUsage, has_cache_report: bool) -> PromptTokens:
        """Return the counts of one request.

        Args:
            has_cache_report: whether its engine runs with ``--enable-cache-report``. With it,
                SGLang omits counts that are 0. Without it, SGLang omits the counts of every
                request that used no prompt stream.
        """
        cached, streamed = usage.cached_tokens, usage.streamed_tokens
        if cached is None and has_cache_report:
            cached = 0
        if streamed is None and usage.prompt_stream is None:
            streamed = 0
        if cached is None or streamed is None:
            return cls(usage.prompt_tokens, streamed, None, None)
        late = usage.prompt_tokens - cached
        return cls(usage.prompt_tokens, streamed, cached - streamed, late)

    @classmethod
    def total(cls, several: Sequence[PromptTokens]) -> PromptTokens:
        """Return the sum of several counts; a count that one of them lacks becomes ``None``."""

        def add(values: Sequence[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return sum(known) if len(known) == len(values) else None

        return cls(
            sum(each.prompt for each in several),
            add([each.streamed for each in several]),
            add([each.cached for each in several]),
            add([each.late for each in several]),
        )


class PromptListener:
    """Collects the prompt tokens of one question's calls, as a listener to their events.

    Args:
        reporting: URLs of the engines that run with ``--enable-cache-report``.
    """

    def __init__(self, reporting: Collection[str]) -> None:
        self._reporting = reporting
        self._calls: dict[str, list[PromptTokens]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallFinished) and event.usage is not None:
            # The rounds of an agent on a staircase are LAYER.PLACE.ROUND.
            agent = ".".join(event.agent.split(".")[:2])
            tokens = PromptTokens.from_usage(event.usage, event.engine in self._reporting)
            self._calls.setdefault(agent, []).append(tokens)

    @property
    def by_agent(self) -> Mapping[str, PromptTokens]:
        """Return the sum over each agent's requests, by ``LAYER.PLACE``, both counted from 1."""
        return {agent: PromptTokens.total(calls) for agent, calls in sorted(self._calls.items())}


def group_by_layer(agents: Mapping[str, PromptTokens]) -> dict[int, list[PromptTokens]]:
    """Return the agents' prompts by their layers, which are counted from 1."""
    layers: dict[int, list[PromptTokens]] = {}
    for agent, prompts in agents.items():
        layers.setdefault(int(agent.split(".")[0]), []).append(prompts)
    return layers
