"""Count what the routers do, for ``/metrics`` (`RouterMetrics`, `ShellMetrics`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from flashmoa.engine import Prefilled
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import RoutedEngine
from flashmoa.router.policies import Policy
from flashmoa.router.prefix_aware import PrefixAware


class _Metrics:
    """Registers one router's metrics, whose names begin with ``prefix``."""

    prefix = ""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}_{name}", description, labels, registry=self._registry)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(f"{self.prefix}_{name}", description, labels, registry=self._registry)


class RouterMetrics(_Metrics):
    """Counts the requests and tokens of the router in front of several engines.

    The label ``engine`` is an engine's URL, with the number of a data-parallel rank if the router
    chooses one.

    Args:
        policy: the loads of its engines are exported if it is a :class:`PrefixAware` policy.
    """

    prefix = "flashmoa_router"

    def __init__(
        self, dispatcher: Dispatcher, engines: Collection[RoutedEngine], policy: Policy
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._engines = engines
        self._policy = policy if isinstance(policy, PrefixAware) else None
        self._requests = self._counter(
            "requests", "Requests by engine and ending", "engine", "ending"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens sent", "engine")
        self._cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that engines report as cached", "engine"
        )
        self._reported_tokens = self._counter(
            "cache_reported_tokens",
            "Prompt tokens of answers that report how many were cached",
            "engine",
        )
        self._waiting = self._gauge("waiting", "Requests without an engine")
        self._up = self._gauge("engine_up", "Whether requests are sent to it", "engine")
        self._load = self._gauge("engine_load", "Outstanding prefill work, in its unit", "engine")
        self._saturated = self._gauge(
            "engine_saturated", "Whether it has enough tokens to compute", "engine"
        )
        self._blocks = self._gauge("engine_blocks", "Blocks believed to be in its cache", "engine")

    def count_prompt(self, engine: str, tokens: int) -> None:
        self._prompt_tokens.labels(engine).inc(tokens)

    def count_cached(self, engine: str, *, cached: Iterable[int], of: Iterable[int]) -> None:
        """Count what an answer reports of each of its prompts: tokens cached, and in all."""
        self._cached_tokens.labels(engine).inc(sum(cached))
        self._reported_tokens.labels(engine).inc(sum(of))

    def count_ending(self, engine: str, ending: str) -> None:
        """Count a request that ended ``answered``, ``refused``, ``left`` or ``lost``."""
        self._requests.labels(engine, ending).inc()

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._waiting.set(self._dispatcher.waiting)
        for gauge in (self._load, self._saturated, self._blocks):
            gauge.clear()  # An engine that is down, or a rank that is gone, has none of these.
        for engine in self._engines:
            self._up.labels(engine.url).set(engine.is_up)
            if self._policy is None or not engine.is_up:
                continue
            for place in engine.places:
                self._load.labels(place).set(self._policy.load(place))
                self._saturated.labels(place).set(self._policy.is_saturated(place))
                self._blocks.labels(place).set(self._policy.cached_blocks(place))
        return generate_latest(self._registry)


class ShellMetrics(_Metrics):
    """Counts the requests and tokens of the shell router."""

    prefix = "flashmoa_shell"

    def __init__(self) -> None:
        super().__init__()
        self._requests = self._counter("requests", "Requests by ending", "ending")
        self._ahead_tokens = self._counter(
            "ahead_tokens", "Prompt tokens that were cached when their last answer was complete"
        )
        self._late_tokens = self._counter(
            "late_tokens", "Prompt tokens computed after that, before the request was sent"
        )
        self._agents = self._gauge("agents", "Answers in the agent prompt cache")

    def count_ending(self, ending: str) -> None:
        """Count a request that ended ``answered``, ``refused``, ``left`` or ``lost``."""
        self._requests.labels(ending).inc()

    def count_completed_prompt(self, prefilled: Prefilled) -> None:
        """Count the tokens of a prompt that was prefilled after its last answer was complete."""
        self._ahead_tokens.inc(prefilled.cached_tokens)
        self._late_tokens.inc(prefilled.prefilled_tokens)

    def page(self, agents: int) -> bytes:
        """Return the metrics in Prometheus's text format, given the number of cached answers."""
        self._agents.set(agents)
        return generate_latest(self._registry)
