"""What the shell router counts, on ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from flashmoa.engine import Prefilled


class ShellCounters:
    """The shell router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "flashmoa_shell_requests", "Requests by ending", ("ending",), registry=self._registry
        )
        self._ahead = Counter(
            "flashmoa_shell_ahead_tokens",
            "Prompt tokens that were cached when their last answer was complete",
            registry=self._registry,
        )
        self._late = Counter(
            "flashmoa_shell_late_tokens",
            "Prompt tokens computed after that, before the request was sent",
            registry=self._registry,
        )
        self._agents = Gauge(
            "flashmoa_shell_agents", "Answers in the agent prompt cache", registry=self._registry
        )

    def ended(self, ending: str) -> None:
        """``answered``, ``refused``, ``left`` or ``lost``."""
        self._requests.labels(ending).inc()

    def settled(self, done: Prefilled) -> None:
        """A prompt is computed."""
        self._ahead.inc(done.cached_tokens)
        self._late.inc(done.prefilled_tokens)

    def page(self, agents: int) -> bytes:
        """In Prometheus's text format. ``agents``: answers that are kept."""
        self._agents.set(agents)
        return generate_latest(self._registry)
