"""How the prompts of one question's agents were computed, in tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flashmoa.engine import PromptUsage
from flashmoa.observe import CallFinished, Event


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """``prompt = streamed + cached + late``; ``None`` where the engine does not say.

    Attributes:
        streamed: computed by the request's own prompt stream before the request came.
        cached: in the engine's radix cache by the work of other requests and streams.
        late: computed when the request came.
    """

    prompt: float
    streamed: float | None
    cached: float | None
    late: float | None

    @classmethod
    def of(cls, usage: PromptUsage, reports: bool) -> PromptTokens:
        """Return those of one request.

        Args:
            reports: whether its engine runs with ``--enable-cache-report``. SGLang then leaves
                out what is 0; without, all that no prompt stream was used for.
        """
        cached, streamed = usage.cached_tokens, usage.streamed_tokens
        if cached is None and reports:
            cached = 0
        if streamed is None and usage.prompt_stream is None:
            streamed = 0
        if cached is None or streamed is None:
            return cls(usage.prompt_tokens, streamed, None, None)
        late = usage.prompt_tokens - cached
        return cls(usage.prompt_tokens, streamed, cached - streamed, late)

    @classmethod
    def total(cls, several: Sequence[PromptTokens]) -> PromptTokens:
        """Return the sum of several."""
        return cls._by(several, sum)

    @classmethod
    def mean(cls, several: Sequence[PromptTokens]) -> PromptTokens:
        """Return the mean of at least one."""
        return cls._by(several, fmean)

    @classmethod
    def _by(
        cls, several: Sequence[PromptTokens], fold: Callable[[Sequence[float]], float]
    ) -> PromptTokens:
        """Fold several into one; what is not known of one is not known of all."""

        def known(values: Sequence[float | None]) -> float | None:
            said = [value for value in values if value is not None]
            return fold(said) if len(said) == len(values) else None

        return cls(
            fold([one.prompt for one in several]),
            known([one.streamed for one in several]),
            known([one.cached for one in several]),
            known([one.late for one in several]),
        )


class PromptListener:
    """Listens to one question's calls.

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
            found = PromptTokens.of(event.usage, event.engine in self._reporting)
            self._calls.setdefault(agent, []).append(found)

    @property
    def by_agent(self) -> Mapping[str, PromptTokens]:
        """Return the sums over each agent's requests, by ``LAYER.PLACE`` from 1."""
        return {agent: PromptTokens.total(calls) for agent, calls in sorted(self._calls.items())}


def layers(agents: Mapping[str, PromptTokens]) -> dict[int, list[PromptTokens]]:
    """Return agents' prompts by their layer, from 1."""
    found: dict[int, list[PromptTokens]] = {}
    for agent, prompts in agents.items():
        found.setdefault(int(agent.split(".")[0]), []).append(prompts)
    return found
