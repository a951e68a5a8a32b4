"""Watch engines: those that are ready join the policy, and the others leave it (`EnginePool`)."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from starlette.responses import Response

from flashmoa.router.cache_tables import BLOCK_TOKENS, SATURATION_MARGIN, EngineTraits
from flashmoa.router.dispatcher import Dispatcher, NoEngine
from flashmoa.router.flops import TOKENS, Measure, true_flops
from flashmoa.router.forwarding import Connections, EngineLost, parse_object
from flashmoa.router.kv_events import EventSource, follow_events, parse_event_source
from flashmoa.router.policy import PrefixAware

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# The tokens of a forward and of a cache, if an engine does not report them.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Configures a router.

    Attributes:
        engines: URLs of the engines.
        policy: decides to which engine each request is sent; by default one with default settings.
        api_key: for the router's own requests to the engines. A client's requests carry the
            client's key.
        model_config: the model's ``config.json``, if the router cannot read it at the path that the
            engines report.
        saturation_margin: how many forwards' tokens wait at an engine before others get requests;
            if it is 0, engines take every request.
        max_body_bytes: the largest body of a request.
        watch_seconds: time between two probes of an engine.
    """

    engines: Sequence[str]
    policy: PrefixAware | None = None
    api_key: str | None = None
    model_config: Mapping[str, Any] | None = None
    saturation_margin: float = SATURATION_MARGIN
    max_body_bytes: int = 32 << 20
    watch_seconds: float = 2.0


@dataclass(slots=True)
class RoutedEngine:
    """Holds the router's state of one engine, which gets requests while it ``is_up``."""

    url: str
    is_up: bool = False
    events: EventSource | None = None
    # In which its KV events are followed.
    following: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # Held during a probe: an engine joins once, and after that is asked again.
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class EnginePool:
    """Probes engines; those that are ready join the dispatcher, and the others leave it.

    The work of all engines is counted in one measure, that of the first one that joins, since loads
    in FLOPs and in tokens cannot be compared.
    """

    def __init__(
        self, connections: Connections, dispatcher: Dispatcher, options: RouterOptions
    ) -> None:
        self.engines = {url: RoutedEngine(url) for url in options.engines}
        self._connections = connections
        self._dispatcher = dispatcher
        self._options = options
        key = options.api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._measure: Measure | None = None
        self._turn = itertools.count()
        self._tasks: TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Watch the engines during this context, which is entered once each was probed."""
        async with anyio.create_task_group() as self._tasks:
            async with anyio.create_task_group() as first_probes:
                for engine in self.engines.values():
                    first_probes.start_soon(self.probe, engine)
            for engine in self.engines.values():
                self._tasks.start_soon(self._watch, engine)
            yield
            self._tasks.cancel_scope.cancel()

    async def _watch(self, engine: RoutedEngine) -> None:
        if not engine.is_up:
            logger.warning("%s is not ready; it gets no requests until it is", engine.url)
        while True:
            await anyio.sleep(self._options.watch_seconds)
            await self.probe(engine)

    async def probe(self, engine: RoutedEngine) -> None:
        """Ask once whether an engine takes requests, and let it join or leave.

        A silent engine stays as it is: it may be busy. Whether it hangs, others find out.
        """
        async with engine.lock:
            try:
                # ``/health`` would not do, because SGLang generates a token to answer it. An engine
                # without the plugin answers 404, and one that shuts down 503.
                answer = await self._ask(engine, "/health/ready")
                is_ready = None if answer is None else answer.status_code < 500
            except EngineLost as lost:
                # An engine that was not reached has ended, or its host has.
                is_ready = None if lost.reached else False
            if is_ready and not engine.is_up:
                if (traits := await self._ask_traits(engine)) is not None:
                    self._let_in(engine, traits)
            elif is_ready is False and engine.is_up:
                self._leave(engine)

    def next_engine(self) -> RoutedEngine:
        """Return an engine, each in turn. Raises: NoEngine if none is up."""
        if not (up := [engine for engine in self.engines.values() if engine.is_up]):
            raise NoEngine
        return up[next(self._turn) % len(up)]

    def has_events(self) -> bool:
        """Return whether an engine publishes KV events."""
        return any(engine.events for engine in self.engines.values())

    def _let_in(self, engine: RoutedEngine, traits: EngineTraits) -> None:
        engine.is_up = True
        self._dispatcher.join(engine.url, traits)
        logger.info("%s answers; its work is counted in %s", engine.url, traits.measure.unit)
        if engine.events is not None:
            scope = engine.following = anyio.CancelScope()
            self._tasks.start_soon(
                follow_events, self._dispatcher, engine.url, engine.events, scope
            )
            return
        text = (
            "No KV events of %s are followed, so an answer without streaming counts as work until "
            "it is complete; start the engine with --kv-events-config if such answers are long"
        )
        logger.warning(text, engine.url)

    def _leave(self, engine: RoutedEngine) -> None:
        """Forget an engine's cache and load. It may still finish answers that it has begun."""
        engine.is_up = False
        # One that has restarted may publish elsewhere, and has another cache.
        engine.following.cancel()
        self._dispatcher.leave(engine.url)
        text = "%s is shutting down or does not answer; it gets no requests until it is ready again"
        logger.warning(text, engine.url)

    async def _ask(self, engine: RoutedEngine, path: str) -> Response | None:
        url = engine.url + path
        return await self._connections.ask("GET", url, self._headers, seconds=_PROBE_SECONDS)

    async def _ask_traits(self, engine: RoutedEngine) -> EngineTraits | None:
        """Ask an engine for its settings. Return ``None`` if it is too busy to report them."""
        try:
            answers = [await self._ask(engine, path) for path in ("/server_info", "/flashmoa/info")]
        except EngineLost:
            return None
        if any(answer is None or answer.status_code >= 500 for answer in answers):
            return None  # Its forwards and its cache are not known yet.
        if answers[0] and answers[0].status_code in (401, 403):
            text = (
                "%s does not tell its settings without its API key, so defaults are used; "
                "start the router with --api-key KEY"
            )
            logger.warning(text, engine.url)
        settings, plugin = (
            parse_object(answer.body) if answer and answer.status_code == 200 else {}
            for answer in answers
        )
        try:
            engine.events = parse_event_source(engine.url, settings)
        except ValueError as error:
            logger.warning("KV events of %s are not followed: %s", engine.url, error)
            engine.events = None
        # The settings are those of one data-parallel rank, among which the engine itself chooses.
        ranks = _positive(settings, "dp_size", 1)
        forward = _positive(settings, "chunked_prefill_size", _BATCH_TOKENS)
        batch = ranks * _positive(plugin, "largest_forward", forward)
        tokens = ranks * _positive(settings, "max_total_num_tokens", _CACHE_TOKENS)
        measure = self._measure = self._measure or await self._choose_measure(settings)
        margin = self._options.saturation_margin
        saturation = int(margin * batch) if margin > 0 else None
        return EngineTraits(measure, saturation, tokens // BLOCK_TOKENS)

    async def _choose_measure(self, settings: Mapping[str, Any]) -> Measure:
        try:
            if (config := self._options.model_config) is None:
                if not (path := settings.get("model_path")):
                    raise ValueError("the engine does not tell its model_path")
                config = json.loads(await (anyio.Path(path) / "config.json").read_text())
            return true_flops(config)
        except (OSError, ValueError, TypeError) as error:  # UnknownShape is a ValueError.
            text = "Work is counted in tokens: %s (--model-config gives another config.json)"
            logger.info(text, error)
            return TOKENS


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default
