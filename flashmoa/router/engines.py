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
from flashmoa.router.kv_events import follow_events, parse_event_source
from flashmoa.router.policy import PrefixAware

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# The tokens of a forward and of a cache, if an engine does not report them.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Configures a router.

    Attributes:
        api_key: for the router's own requests to the engines; a client's have the client's.
        model_config: the model's ``config.json``, if it is not at the path that the engines report.
        saturation_margin: how many forwards' tokens wait at an engine before others get requests;
            if it is 0, engines take every request.
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
    # Where it publishes KV events, and the scope in which these are followed.
    events: str | None = None
    following: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    # When it was last probed because a request had failed; such probes hold the lock.
    checked: float = 0.0
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
        self._headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
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
        """Ask whether an engine takes requests; a silent one may be busy, and stays as it is."""
        answers = await self._answers(engine)
        if answers is False and engine.is_up:
            self._leave(engine)
        elif answers and not engine.is_up and (traits := await self._ask_traits(engine)):
            self._let_in(engine, traits)

    async def recheck(self, engine: RoutedEngine) -> None:
        """Let an engine leave that has failed a request, unless it answers a probe.

        Requests that failed before a probe began share its result.
        """
        failed = anyio.current_time()
        async with engine.lock:
            if engine.is_up and engine.checked < failed:
                engine.checked = anyio.current_time()
                if not await self._answers(engine) and engine.is_up:
                    self._leave(engine)

    async def _answers(self, engine: RoutedEngine) -> bool | None:
        """Return whether an engine takes requests; ``None`` if it is silent."""
        # ``/health`` would not do, because SGLang generates a token to answer it. An engine
        # without the plugin answers 404, and one that shuts down 503.
        answer = await self._ask(engine, "/health/ready")
        return None if answer is None else answer.status_code < 500

    def next_engine(self) -> RoutedEngine:
        """Return an engine, each in turn. Raises: NoEngine if none is up."""
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
        # One that has restarted may publish elsewhere, and has another cache.
        engine.following.cancel()
        self._dispatcher.policy.leave(engine.url)
        self._dispatcher.reconsider()  # If no engine is left, every request that waits fails.
        text = "%s is shutting down or does not answer; it gets no requests until it is ready again"
        logger.warning(text, engine.url)

    async def _ask(self, engine: RoutedEngine, path: str) -> Response | None:
        """Return an engine's answer; ``None`` if it is silent, and 503 if it is not there."""
        url = engine.url + path
        try:
            return await self._connections.ask(url, self._headers, seconds=_PROBE_SECONDS)
        except EngineLost as lost:
            return None if lost.reached else Response(status_code=503)

    async def _ask_object(self, engine: RoutedEngine, path: str) -> dict[str, Any] | None:
        """Return what an engine tells at a path; ``None`` if it should be asked again later."""
        answer = await self._ask(engine, path)
        if answer is None or answer.status_code >= 500:
            return None
        if answer.status_code in (401, 403):
            text = "%s tells no %s without its API key (--api-key), so defaults are used"
            logger.warning(text, engine.url, path)
        return parse_object(answer.body) if answer.status_code == 200 else {}

    async def _ask_traits(self, engine: RoutedEngine) -> EngineTraits | None:
        """Ask an engine for its settings. Return ``None`` if it is too busy to report them."""
        settings = await self._ask_object(engine, "/server_info")
        plugin = await self._ask_object(engine, "/flashmoa/info")
        if settings is None or plugin is None:
            return None  # Its forwards and its cache are not known yet.
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
        chosen = self._measure or await self._choose_measure(settings)
        self._measure = self._measure or chosen  # Another engine may have joined meanwhile.
        margin = self._options.saturation_margin
        saturation = max(1, int(margin * batch)) if margin > 0 else None
        return EngineTraits(self._measure, saturation, tokens // BLOCK_TOKENS)

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


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default
