"""Count what the router does, for ``/metrics`` (`RouterMetrics`), and what its engines answer."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from flashmoa.router.dispatcher import Dispatcher, Placement
from flashmoa.router.forwarding import AnswerObserver

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
# The usage of a streamed answer is within this many bytes of its end.
_USAGE_BYTES = 4096


class RouterMetrics:
    """Counts the requests and tokens of the router in front of several engines.

    The label ``engine`` is an engine's URL, with the number of a data-parallel rank if the router
    chooses one.

    Attributes:
        requests: by engine and ending, see :class:`~flashmoa.router.forwarding.AnswerObserver`.
        prompt_tokens, cached_tokens, reported_tokens: prompt tokens as sent; of the answers that
            report how many were cached, those that were, and all.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by engine and ending", "ending")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens sent")
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that engines report as cached"
        )
        self.reported_tokens = self._counter(
            "cache_reported_tokens", "Prompt tokens of answers that report how many were cached"
        )
        self._waiting = self._gauge("waiting", "Requests without an engine")
        self._up = self._gauge("engine_up", "Whether requests are sent to it", "engine")
        self._load = self._gauge("engine_load", "Outstanding prefill work, in its unit", "engine")
        self._saturated = self._gauge(
            "engine_saturated", "Whether it has enough tokens to compute", "engine"
        )
        self._blocks = self._gauge("engine_blocks", "Blocks believed to be in its cache", "engine")

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        labels = ("engine", *labels)
        return Counter(f"flashmoa_router_{name}", about, labels, registry=self._registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"flashmoa_router_{name}", about, labels, registry=self._registry)

    def page(self, up: dict[str, bool]) -> bytes:
        """Return the metrics in Prometheus's text format.

        Args: up: whether requests are sent to each engine, by URL.
        """
        self._waiting.set(self._dispatcher.waiting)
        for url, is_up in up.items():
            self._up.labels(url).set(is_up)
        for gauge in (self._load, self._saturated, self._blocks):
            gauge.clear()  # An engine that is down, or a rank that is gone, has none of these.
        for place, tables in self._dispatcher.policy.engines.items():
            self._load.labels(place).set(tables.load.total)
            self._saturated.labels(place).set(tables.is_saturated)
            self._blocks.labels(place).set(len(tables.blocks))
        return generate_latest(self._registry)


class PlacementObserver(AnswerObserver):
    """Learns from an answer that its prompt is computed, and how much of it was cached.

    The first piece of an answer shows that a prompt is computed; of a list of prompts, its end.

    Args:
        placement: the request's placement, if it has one.
    """

    def __init__(
        self, metrics: RouterMetrics, engine: str, placement: Placement | None = None
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._placement = placement
        self._tail = b""

    def receive(self, content: bytes) -> None:
        if self._placement is not None and not self._placement.is_list:
            self._placement.finish_prefill()
        # An answer without streaming is a single piece, and its usage may be anywhere in it.
        self._tail = (self._tail + content)[-max(_USAGE_BYTES, len(content)) :]

    def end(self, ending: str) -> None:
        if ending == "answered":
            if self._placement is not None:
                self._placement.finish_prefill()
            if cached := self._usage(_CACHED_TOKENS):
                self._metrics.cached_tokens.labels(self._engine).inc(sum(cached))
                of = sum(self._usage(_PROMPT_TOKENS))
                self._metrics.reported_tokens.labels(self._engine).inc(of)
        self._metrics.requests.labels(self._engine, ending).inc()

    def _usage(self, field: re.Pattern[bytes]) -> list[int]:
        """Return a field of the usage: of each prompt of a whole answer, or a stream's last one."""
        found = [int(number) for number in field.findall(self._tail)]
        is_whole = self._tail.startswith((b"{", b"["))
        return found if is_whole else found[-1:]
