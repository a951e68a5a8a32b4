"""Count questions, agents and tokens of a server, for ``/metrics`` (``ServeMetrics``)."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flashmoa.moa.agent import Agent
from flashmoa.moa.results import Result

# In seconds. A question takes as long as several answers after each other.
_BUCKETS = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)


class ServeMetrics:
    """Registers the metrics of one server; ``model`` is the name that clients ask for."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "flashmoa_moa"
        self._questions = Counter(
            f"{prefix}_questions", "Questions by ending", ["model", "ending"], registry=registry
        )
        self._running = Gauge(
            f"{prefix}_running", "Questions that are being answered", ["model"], registry=registry
        )
        self._agents = Counter(
            f"{prefix}_agents", "Agents by what became of their answers",
            ["model", "agent_model", "status"], registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            f"{prefix}_tokens", "Tokens of agents by kind",
            ["model", "agent_model", "kind"], registry=registry,
        )  # fmt: skip
        self._substitutions = Counter(
            f"{prefix}_substitutions", "Answers that another agent gave in place of the last one",
            ["model", "kind"], registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{prefix}_seconds", "Time of a question", ["model"],
            registry=registry, buckets=_BUCKETS,
        )  # fmt: skip
        self._first_token = Histogram(
            f"{prefix}_first_token_seconds", "Time to a streamed answer's first token", ["model"],
            registry=registry, buckets=_BUCKETS,
        )  # fmt: skip

    @property
    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def count_running(self, model: str, change: int) -> None:
        """Add to the number of questions that are being answered."""
        self._running.labels(model).inc(change)

    def count_ending(self, model: str, ending: str) -> None:
        """Count a question that ended ``answered``, ``refused``, ``failed`` or ``left``."""
        self._questions.labels(model, ending).inc()

    def observe_first_token(self, model: str, seconds: float) -> None:
        """Record the seconds from a question to its answer's first token."""
        self._first_token.labels(model).observe(seconds)

    def observe_result(self, model: str, result: Result, seconds: float) -> None:
        """Record an answer's seconds, and what its agents did."""
        self._seconds.labels(model).observe(seconds)
        if result.substitution is not None:
            self._substitutions.labels(model, result.substitution.kind).inc()
        for agent in result.agents:
            self._agents.labels(model, agent.model, agent.status).inc()

    def count_tokens(self, model: str, agents: Sequence[Agent]) -> None:
        """Count what the agents of a question have spent; estimated if an engine did not say."""
        for agent in agents:
            spent, agent_model = agent.spent(), agent.model.model
            self._tokens.labels(model, agent_model, "prompt").inc(spent.prompt_tokens)
            self._tokens.labels(model, agent_model, "completion").inc(spent.completion_tokens)
