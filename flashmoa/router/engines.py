"""Watch engines: let ready ones join the policy, and the others leave it (`EnginePool`)."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup
from starlette.responses import Response

from flashmoa.router.cache_tables import BLOCK_TOKENS, EngineTraits
from flashmoa.router.dispatcher import Dispatcher, NoEngine
from flashmoa.router.flops import TOKENS, Measure, true_flops
from flashmoa.router.forwarding import Connections, EngineLost, LimitReached, parse_object
from flashmoa.router.kv_events import follow_events, parse_event_source
from flashmoa.router.policy import PrefixAware
from flashmoa.router.saturation import (
    FORWARD_MARGIN,
    ForwardSizes,
    FullLoad,
    full_load,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Configures a router.

    Attributes:
        api_key: for the router's own requests. Clients' requests have the clients' keys.
        model_config: the model's ``config.json``, if it is not at the path that the engines report.
        saturation_margin: number of its largest forwards that fill an engine; 0: it is never full.
    """

    engines: Sequence[str]
    policy: PrefixAware | None = None
    api_key: str | None = None
    model_config: Mapping[str, Any] | None = None
    saturation_margin: float = FORWARD_MARGIN
    max_body_bytes: int = 32 << 20
    watch_seconds: float = 2.0


@dataclass(slots=True)
class RoutedEngine:
    """One engine's state in the router. The engine gets requests while it ``is_up``."""

    url: str
    is_up: bool = False
    # Its settings when it joined, and whether it had measured its forwards when it was last asked.
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_measured: bool = True
    # The address of its KV events, and the cancel scope of the task that follows them.
    events: str | None = None
    following: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # The time of the last probe after a failed request; such probes hold the lock.
    checked: float = 0.0
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class EnginePool:
    """Probes engines; ready ones join the dispatcher, and the others leave it.

    The work of all engines is counted in one measure, since loads in FLOPs and in tokens cannot be
    compared. The first engine that joins decides the measure.
    """

    def __init__(
        self, connections: Connections, dispatcher: Dispatcher, options: RouterOptions
    ) -> None:
        self.engines = {url: RoutedEngine(url) for url in options.engines}
        self._connections = connections
        self._dispatcher = dispatcher
        self._options = options
        self._headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._measure: Measure | None = None
        self._turn = itertools.count()
        self._tasks: TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Watch the engines during this context. It begins once each was probed."""
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
        """Ask whether an engine takes requests. A silent one may be busy, and keeps its state.

        So does one that the router cannot ask, as its host has reached a limit.
        """
        with suppress(LimitReached):
            answers = await self._answers(engine)
            if answers is False and engine.is_up:
                self._leave(engine)
            elif answers and not engine.is_up and (traits := await self._ask_traits(engine)):
                self._let_in(engine, traits)
            elif answers and engine.is_up and not engine.has_measured:
                await self._ask_measured(engine)

    async def recheck(self, engine: RoutedEngine) -> None:
        """Let an engine that has failed a request leave, unless it answers a probe.

        It stays, too, if the router's host has reached a limit and cannot send the probe.
        Requests that failed before a probe began share its result.
        """
        failed = anyio.current_time()
        async with engine.lock:
            if engine.is_up and engine.checked < failed:
                engine.checked = anyio.current_time()
                with suppress(LimitReached):
                    if not await self._answers(engine) and engine.is_up:
                        self._leave(engine)

    async def _answers(self, engine: RoutedEngine) -> bool | None:
        """Return whether an engine takes requests; ``None`` if it is silent."""
        # Not ``/health``: SGLang generates a token to answer it. An engine without the plugin
        # answers 404, and one that shuts down 503.
        answer = await self._ask(engine, "/health/ready")
        return None if answer is None else answer.status_code < 500

    def next_engine(self) -> RoutedEngine:
        """Return the engines in turn, one at a call. Raises: NoEngine if none is up."""
        if not (up := [engine for engine in self.engines.values() if engine.is_up]):
            raise NoEngine
        return up[next(self._turn) % len(up)]

    def _let_in(self, engine: RoutedEngine, traits: EngineTraits) -> None:
        engine.is_up = True
        self._dispatcher.policy.join(engine.url, traits)
        self._dispatcher.reconsider()
        logger.info("%s answers; its work is counted in %s", engine.url, traits.measure.unit)
        if engine.events is not None:
            stop = engine.following = anyio.CancelScope()
            self._tasks.start_soon(follow_events, self._dispatcher, engine.url, engine.events, stop)

    def _leave(self, engine: RoutedEngine) -> None:
        """Forget an engine's cache and load. It may still finish answers that it has begun."""
        engine.is_up = False
        # After a restart, an engine has an empty cache and may publish events elsewhere.
        engine.following.cancel()
        self._dispatcher.policy.leave(engine.url)
        self._dispatcher.reconsider()  # If no engine is left, every waiting request fails.
        text = "%s is shutting down or does not answer; it gets no requests until it is ready again"
        logger.warning(text, engine.url)

    async def _ask(self, engine: RoutedEngine, path: str) -> Response | None:
        """Return an engine's answer; ``None`` if it is silent, 503 if nothing listens there."""
        url = engine.url + path
        try:
            return await self._connections.ask(url, self._headers)
        except EngineLost as lost:
            return None if lost.reached else Response(status_code=503)

    async def _ask_object(self, engine: RoutedEngine, path: str) -> dict[str, Any] | None:
        """Return the object that an engine answers; ``None`` if it should be asked again later."""
        answer = await self._ask(engine, path)
        if answer is None or answer.status_code >= 500:
            return None
        if answer.status_code in (401, 403):
            text = "%s tells no %s without its API key (--api-key), so defaults are used"
            logger.warning(text, engine.url, path)
        return parse_object(answer.body) if answer.status_code == 200 else {}

    async def _ask_plugin(self, engine: RoutedEngine) -> dict[str, Any] | None:
        plugin = await self._ask_object(engine, "/flashmoa/info")
        if plugin is not None:
            # A stock engine will never have costs.
            engine.has_measured = plugin.get("costs", ...) is not None
        return plugin

    async def _ask_traits(self, engine: RoutedEngine) -> EngineTraits | None:
        """Ask an engine for its settings. Return ``None`` if it is too busy to report them."""
        settings = await self._ask_object(engine, "/server_info")
        plugin = await self._ask_plugin(engine)
        if settings is None or plugin is None:
            return None  # Its forwards and its cache are not known yet.
        try:
            engine.events = parse_event_source(engine.url, settings)
        except ValueError as error:
            logger.warning("KV events of %s are not followed: %s", engine.url, error)
            engine.events = None
        engine.settings = settings
        chosen = self._measure or await self._choose_measure(settings)
        self._measure = self._measure or chosen  # Another engine may have joined meanwhile.
        tokens = _ranks(settings) * _positive(settings, "max_total_num_tokens", default=1 << 20)
        full = self._full_load(engine, plugin, self._measure)
        return EngineTraits(self._measure, full, tokens // BLOCK_TOKENS)

    async def _ask_measured(self, engine: RoutedEngine) -> None:
        """Ask an engine again that joined before it had measured its forwards."""
        plugin = await self._ask_plugin(engine)
        if plugin is not None and self._measure is not None:
            full = self._full_load(engine, plugin, self._measure)
            self._dispatcher.policy.change_full_load(engine.url, full)
            self._dispatcher.reconsider()

    def _full_load(
        self, engine: RoutedEngine, plugin: Mapping[str, Any], measure: Measure
    ) -> FullLoad | None:
        """Return when an engine is full, given its ``/flashmoa/info``; ``None``: never."""
        options, told = self._options, plugin.get("saturation")
        if options.saturation_margin <= 0:
            return None
        measured = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        forward = _positive(engine.settings, "chunked_prefill_size", default=8192)
        sizes = ForwardSizes(
            largest=_positive(plugin, "largest_forward", forward),
            needed=_positive(measured, "tokens", 0),
            waits_for=_positive(plugin, "prefills_wait_for", 0),
        )
        one = full_load(measure, sizes, options.saturation_margin)
        ranks = _ranks(engine.settings)
        return FullLoad(ranks * one.work, ranks * one.tokens)

    async def _choose_measure(self, settings: Mapping[str, Any]) -> Measure:
        try:
            if (config := self._options.model_config) is None:
                if not (path := settings.get("model_path")):
                    raise ValueError("the engine does not tell its model_path")
                config = json.loads(await (anyio.Path(path) / "config.json").read_bytes())
            return true_flops(config)
        except (OSError, ValueError, TypeError) as error:  # UnknownShape is a ValueError.
            text = "Work is counted in tokens: %s (--model-config gives another config.json)"
            logger.info(text, error)
            return TOKENS


def _ranks(settings: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks. Settings hold for one; the engine chooses it."""
    return _positive(settings, "dp_size", default=1)


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default
