"""The routers' metrics on ``/metrics``, each router's in a registry of its own."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from flashmoa.engine import Prefilled
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import RoutedEngine
from flashmoa.router.policies import Policy
from flashmoa.router.prefix_aware import PrefixAware


class RouterMetrics:
    """What the router counts.

    Args:
        policy: its loads are shown if it is prefix-aware.
    """

    def __init__(
        self, dispatcher: Dispatcher, engines: Collection[RoutedEngine], policy: Policy
    ) -> None:
        self._dispatcher = dispatcher
        self._engines = engines
        self._policy = policy if isinstance(policy, PrefixAware) else None
        self._registry = CollectorRegistry()
        self._answers = self._counter("requests", "Requests by engine and ending", "ending")
        self._tokens = self._counter("prompt_tokens", "Prompt tokens sent")
        self._cached = self._counter("cached_tokens", "Prompt tokens that engines had cached")
        self._waiting = Gauge(
            "flashmoa_router_waiting", "Requests without an engine", registry=self._registry
        )
        self._up = self._gauge("engine_up", "Whether requests are sent to it")
        self._load = self._gauge("engine_load", "Outstanding prefill work, in its unit")
        self._saturated = self._gauge("engine_saturated", "Whether its load is at the threshold")
        self._blocks = self._gauge("engine_blocks", "Blocks believed to be in its cache")

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(
            f"flashmoa_router_{name}", about, ("engine", *labels), registry=self._registry
        )

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"flashmoa_router_{name}", about, ("engine",), registry=self._registry)

    def sent(self, engine: str, tokens: int) -> None:
        self._tokens.labels(engine).inc(tokens)

    def cached(self, engine: str, tokens: int) -> None:
        self._cached.labels(engine).inc(tokens)

    def ended(self, engine: str, ending: str) -> None:
        """Count an ending: ``answered``, ``refused``, ``left`` or ``lost``."""
        self._answers.labels(engine, ending).inc()

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._waiting.set(self._dispatcher.waiting)
        for engine in self._engines:
            self._up.labels(engine.url).set(engine.is_up)
            if self._policy is not None and engine.is_up:
                self._load.labels(engine.url).set(self._policy.load(engine.url))
                self._saturated.labels(engine.url).set(self._policy.is_saturated(engine.url))
                self._blocks.labels(engine.url).set(self._policy.cached_blocks(engine.url))
        return generate_latest(self._registry)


class ShellMetrics:
    """What the shell router counts."""

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
        """Count an ending: ``answered``, ``refused``, ``left`` or ``lost``."""
        self._requests.labels(ending).inc()

    def prompt_completed(self, done: Prefilled) -> None:
        """Count the tokens of a prompt whose last answer is complete."""
        self._ahead.inc(done.cached_tokens)
        self._late.inc(done.prefilled_tokens)

    def page(self, agents: int) -> bytes:
        """Return the metrics in Prometheus's text format. ``agents``: answers that are kept."""
        self._agents.set(agents)
        return generate_latest(self._registry)
