"""Monitor engines and their data-parallel ranks (`EngineMonitor`)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import httpx

from flashmoa.router.blocks import BLOCK_TOKENS
from flashmoa.router.client_requests import parse_object
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.event_sources import EventSource, parse_event_sources
from flashmoa.router.flops import Measure, TokenCount, UnknownShape, true_flops
from flashmoa.router.policies import SATURATION_MARGIN, EngineTraits

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# The tokens of a forward and of a cache, if an engine does not report them.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20
# An engine's URL has no fragment, so this separates it from the number of a rank.
_RANK_MARK = "#"


@dataclass(slots=True)
class RoutedEngine:
    """Holds the router's state of one engine.

    Attributes:
        is_up: whether requests are sent to it.
        unit: the unit in which its work is counted.
        saturation: the threshold ``T`` of each place in tokens; ``None`` if it takes every request.
        ranks: the number of data-parallel ranks among which the router chooses; 1 if the engine
            chooses itself, or has one.
        events: the publishers of its KV events, one for each data-parallel rank.
        absence_logged: whether the log says already that it is not up.
        checked: when the last probe after a broken connection began.
    """

    url: str
    is_up: bool = False
    unit: str = ""
    saturation: int | None = None
    ranks: int = 1
    events: tuple[EventSource, ...] = ()
    absence_logged: bool = False
    checked: float = -math.inf
    # Held while it joins, so that its ranks do not change meanwhile.
    joining: anyio.Lock = field(default_factory=anyio.Lock)
    checking: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def places(self) -> list[str]:
        """Return the names by which the dispatcher knows the engine: one for each of its ranks."""
        if self.ranks == 1:
            return [self.url]
        return [f"{self.url}{_RANK_MARK}{rank}" for rank in range(self.ranks)]


def split_place(place: str) -> tuple[str, int | None]:
    """Return the URL of the engine at a place, and the rank; ``None`` if the engine chooses it."""
    url, _, rank = place.partition(_RANK_MARK)
    return url, int(rank) if rank else None


class EngineMonitor:
    """Probes engines; those that are ready join the dispatcher, and the others leave it.

    The work of all engines is counted in one measure, that of the first one that joins, since loads
    in FLOPs and in tokens cannot be compared. It is chosen anew if no engine is left.

    Args:
        config: the model's configuration.
        interval: seconds between two probes of an engine.
        on_join: called with each engine that has joined, also when it joins again.

    The other arguments are those of :class:`~flashmoa.router.application.RouterOptions`.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        dispatcher: Dispatcher,
        *,
        config: Mapping[str, Any] | None = None,
        saturation_margin: float = SATURATION_MARGIN,
        interval: float = 2.0,
        on_join: Callable[[RoutedEngine], None] = lambda _: None,
    ) -> None:
        self._http = http
        self._dispatcher = dispatcher
        self._config = config
        self._margin = saturation_margin
        self._interval = interval
        self._on_join = on_join
        self._measure: Measure = TokenCount()

    async def run(self, engine: RoutedEngine) -> None:
        """Probe an engine at intervals, until cancelled."""
        while True:
            await self.probe(engine)
            await anyio.sleep(self._interval)

    async def probe(self, engine: RoutedEngine) -> None:
        """Ask once whether an engine answers, and let it join or leave.

        A silent engine stays as it is: it may be busy. That it hangs is for others to find out.
        """
        if (answers := await self._answers(engine)) is not None:
            await self._update(engine, answers)
        if not engine.is_up and not engine.absence_logged:
            engine.absence_logged = True
            logger.warning("%s is not ready; it gets no requests until it is", engine.url)

    async def recheck(self, engine: RoutedEngine) -> None:
        """Let an engine leave whose connection has broken, unless it answers a probe.

        Requests whose connections broke before a probe began share its result.
        """
        broken = anyio.current_time()
        async with engine.checking:
            if engine.is_up and engine.checked < broken:
                engine.checked = anyio.current_time()
                await self._update(engine, bool(await self._answers(engine)))

    async def _update(self, engine: RoutedEngine, answers: bool) -> None:
        if answers and not engine.is_up:
            await self._join(engine)
        elif engine.is_up and not answers:
            self._leave(engine)

    async def _join(self, engine: RoutedEngine) -> None:
        async with engine.joining:
            # Another probe may have let it join.
            traits = None if engine.is_up else await self._ask_traits(engine)
            if traits is not None:
                self._let_in(engine, traits)

    def _let_in(self, engine: RoutedEngine, traits: EngineTraits) -> None:
        if not self._dispatcher.engines:
            self._measure = traits.measure
        traits = replace(traits, measure=self._measure)
        engine.unit, engine.saturation = traits.measure.unit, traits.saturation
        engine.is_up, engine.absence_logged = True, False
        for place in engine.places:
            self._dispatcher.join(place, traits)
        self._on_join(engine)
        logger.info("%s answers; its work is counted in %s", engine.url, engine.unit)
        if not engine.events:
            text = (
                "%s publishes no KV events, so an answer without streaming counts as work until it "
                "is complete; start the engine with --kv-events-config if such answers are long"
            )
            logger.warning(text, engine.url)

    def _leave(self, engine: RoutedEngine) -> None:
        """Forget an engine's cache and load. It may still finish answers that it has begun."""
        engine.is_up, engine.absence_logged = False, True
        for place in engine.places:
            self._dispatcher.leave(place)
        text = "%s is shutting down or does not answer; it gets no requests until it is ready again"
        logger.warning(text, engine.url)

    async def _answers(self, engine: RoutedEngine) -> bool | None:
        """Return whether an engine takes new requests, which it does not while it shuts down.

        Return ``None`` if it accepts connections but is silent.
        """
        # ``/health`` would not do, because SGLang generates a token to answer it. An engine without
        # the plugin answers 404.
        try:
            answer = await self._http.get(f"{engine.url}/health/ready", timeout=_PROBE_SECONDS)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return False  # The engine has ended, or its host has.
        except httpx.RequestError:
            return None
        return answer.status_code < 500

    async def _ask_traits(self, engine: RoutedEngine) -> EngineTraits | None:
        """Ask an engine for its settings. Return ``None`` if it is too busy to report them."""
        try:
            settings = await self._http.get(f"{engine.url}/server_info", timeout=_PROBE_SECONDS)
            own = await self._http.get(f"{engine.url}/flashmoa/info", timeout=_PROBE_SECONDS)
        except httpx.HTTPError:
            return None
        if max(own.status_code, settings.status_code) >= 500:
            return None  # Its ranks, or its forwards and its cache, are not known yet.
        if settings.status_code in (401, 403):
            text = (
                "%s does not tell its settings without its API key, so defaults are used; "
                "start the router with --api-key KEY"
            )
            logger.warning(text, engine.url)
        info, plugin = (
            parse_object(answer.content) if answer.is_success else {} for answer in (settings, own)
        )
        engine.events = _find_event_sources(engine.url, info)
        # The settings are those of one data-parallel rank.
        unnamed_ranks = self._divide(engine, info, plugin)
        forward = _positive(info, "chunked_prefill_size", _BATCH_TOKENS)
        batch = unnamed_ranks * _positive(plugin, "largest_forward", forward)
        tokens = unnamed_ranks * _positive(info, "max_total_num_tokens", _CACHE_TOKENS)
        limit = int(self._margin * batch) if self._margin > 0 else None
        return EngineTraits(await self._choose_measure(info), limit, tokens // BLOCK_TOKENS)

    def _divide(
        self, engine: RoutedEngine, info: Mapping[str, Any], plugin: Mapping[str, Any]
    ) -> int:
        """Make each data-parallel rank a place if requests can name it.

        Args: plugin: the engine's ``/flashmoa/info``; a plugin that tells its ranks lets every
            request name one.

        Return the number of ranks at each place.
        """
        told = _positive(plugin, "data_parallel_ranks", 0)
        ranks = told or _positive(info, "dp_size", 1)
        # Without events by rank it would be unknown which rank has a block.
        can_name = told > 0 and len(engine.events) in (0, ranks)
        engine.ranks = ranks if can_name else 1
        if engine.ranks < ranks:
            text = (
                "%s chooses itself among its %d data-parallel ranks, so prompts may be computed on "
                "several of them; requests name the rank on engines with this version's plugin"
            )
            logger.warning(text, engine.url, ranks)
        return ranks // engine.ranks

    async def _choose_measure(self, info: Mapping[str, Any]) -> Measure:
        try:
            if (config := self._config) is None:
                if not (path := info.get("model_path")):
                    raise ValueError("the engine does not tell its model_path")
                config = json.loads(await (anyio.Path(path) / "config.json").read_text())
            return true_flops(config)
        except (OSError, ValueError, TypeError) as error:  # UnknownShape is a ValueError.
            unread = f"{error}; give the model's config.json with --model-config"
            reason = error if isinstance(error, UnknownShape) else unread
            logger.info("Work is counted in tokens: %s", reason)
            return TokenCount()


def _find_event_sources(url: str, info: Mapping[str, Any]) -> tuple[EventSource, ...]:
    try:
        return parse_event_sources(url, info)
    except ValueError as error:
        logger.warning("KV events of %s are not followed: %s", url, error)
        return ()


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default
