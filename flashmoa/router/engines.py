"""Monitor engines (`EngineMonitor`), and ask whether prompts are computed (`PrefillPoller`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from flashmoa.router.blocks import BLOCK_TOKENS
from flashmoa.router.client_requests import parse_object
from flashmoa.router.dispatcher import Dispatcher, Placement
from flashmoa.router.flops import Measure, TokenCount, UnknownShape, true_flops
from flashmoa.router.kv_events import EventSource, parse_event_sources
from flashmoa.router.policies import SATURATION_MARGIN, EngineTraits

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# How long to wait between two probes of an engine that drops its connections.
_DROPPED_SECONDS = 0.05
# After this many unanswered requests for its settings, an engine joins without them.
_MAX_SILENT = 6
# The tokens of a forward and of a cache, if an engine does not report them.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20
# How long to wait between two polls, and how much longer after a poll that failed.
_POLL_SECONDS, _FAILED_POLL_SECONDS = 0.25, 5.0
# How many snapshots after the first one are needed, because the first one may show a forward that
# had begun before the request arrived.
_LATER_SNAPSHOTS = 2


@dataclass(slots=True)
class RoutedEngine:
    """Holds the router's state of one engine.

    Attributes:
        is_up: whether requests are sent to it.
        unit: the unit in which its work is counted.
        saturation: the threshold ``T`` in tokens; ``None`` if it takes every request.
        events: the publishers of its KV events, one for each data-parallel rank.
        described: set once ``events`` is known.
        last_answer: when it last answered a probe, by the event loop's clock.
        silences: how many times in a row it did not report its settings in time.
    """

    url: str
    is_up: bool = False
    unit: str = ""
    saturation: int | None = None
    events: tuple[EventSource, ...] = ()
    described: anyio.Event = field(default_factory=anyio.Event)
    last_answer: float = 0.0
    silences: int = 0
    _hang_scopes: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])

    @contextmanager
    def hang_scope(self) -> Generator[anyio.CancelScope]:
        """Cancel the context's body if the engine hangs."""
        with anyio.CancelScope() as scope:
            self._hang_scopes.add(scope)
            try:
                yield scope
            finally:
                self._hang_scopes.discard(scope)

    def cancel_waiting(self) -> None:
        """Cancel everything that waits for this engine."""
        for scope in self._hang_scopes:
            scope.cancel()


class EngineMonitor:
    """Probes engines; those that are ready join the dispatcher, and the others leave it.

    ``config`` is the model's, and ``interval`` the time between two probes of an engine in seconds.
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
        hung_seconds: float = 40.0,
    ) -> None:
        self._http = http
        self._dispatcher = dispatcher
        self._config = config
        self._margin = saturation_margin
        self._interval = interval
        self._hung_seconds = hung_seconds

    async def run(self, engine: RoutedEngine) -> None:
        """Probe an engine at intervals, until cancelled."""
        while True:
            await self.probe(engine)
            await anyio.sleep(self._interval)

    async def probe(self, engine: RoutedEngine) -> None:
        """Ask once whether an engine answers, and let it join or leave."""
        await self._update(engine, await self._answers(engine))

    async def recheck(self, engine: RoutedEngine) -> None:
        """Probe an engine whose connection has broken until it is certain whether it answers."""
        answers = None
        with anyio.move_on_after(min(_PROBE_SECONDS, self._hung_seconds)):
            # While an engine shuts down, it may still accept connections and drop them.
            while (answers := await self._answers(engine)) is None:  # noqa: ASYNC110
                await anyio.sleep(_DROPPED_SECONDS)
        await self._update(engine, answers)

    async def _update(self, engine: RoutedEngine, answers: bool | None) -> None:
        """Let an engine join or leave, given the result of :meth:`_answers`."""
        if answers and not engine.is_up:
            await self._join(engine)
        elif answers is False and engine.is_up:
            self._leave(engine)
        elif answers is None and engine.is_up and self._hangs(engine):
            self._leave(engine)
            engine.cancel_waiting()

    def _hangs(self, engine: RoutedEngine) -> bool:
        # A busy engine answers late, or closes an idle connection, but not for longer than this.
        return anyio.current_time() - engine.last_answer >= self._hung_seconds

    async def _join(self, engine: RoutedEngine) -> None:
        traits = await self._ask_traits(engine)
        if traits is None or engine.is_up:
            return  # A later probe asks again, or another probe has let it join.
        engine.unit, engine.saturation = traits.measure.unit, traits.saturation
        engine.is_up = True
        engine.described.set()
        self._dispatcher.join(engine.url, traits)
        logger.info("%s answers; its work is counted in %s", engine.url, engine.unit)

    def _leave(self, engine: RoutedEngine) -> None:
        """Forget an engine's cache and load. It may still finish answers that it has begun."""
        engine.is_up = False
        self._dispatcher.leave(engine.url)
        text = "%s is shutting down or does not answer; it gets no requests until it is ready again"
        logger.warning(text, engine.url)

    async def _answers(self, engine: RoutedEngine) -> bool | None:
        """Return whether an engine takes new requests, which it does not while it shuts down.

        Return ``None`` if it accepts connections but is silent.
        """
        # ``/health`` would not do, because SGLang generates a token to answer it. An engine without
        # the plugin answers 404.
        try:
            seconds = min(_PROBE_SECONDS, self._hung_seconds)
            answer = await self._http.get(f"{engine.url}/health/ready", timeout=seconds)
        except httpx.ConnectError:
            return False  # If an engine has ended, its host refuses connections.
        except httpx.RequestError:
            return None
        engine.last_answer = anyio.current_time()
        return answer.status_code < 500

    async def _ask_traits(self, engine: RoutedEngine) -> EngineTraits | None:
        """Ask an engine for its settings. Return ``None`` if it is too busy to report them."""
        info: dict[str, Any] = {}
        try:
            answer = await self._http.get(f"{engine.url}/server_info", timeout=_PROBE_SECONDS)
            engine.silences = 0
            if answer.is_success:
                info = parse_object(answer.content)
            elif answer.status_code in (401, 403):
                text = (
                    "%s does not tell its settings without its API key, so defaults are used; "
                    "start the router with --api-key KEY"
                )
                logger.warning(text, engine.url)
        except httpx.HTTPError:
            engine.silences += 1
            if engine.silences < _MAX_SILENT:
                return None
        measure = self._choose_measure(info)
        engine.events = parse_event_sources(engine.url, info)
        # The settings are those of one data-parallel rank.
        ranks = _positive(info, "dp_size", 1)
        told = await self._ask_largest_forward(engine)
        batch = ranks * (told or _positive(info, "chunked_prefill_size", _BATCH_TOKENS))
        blocks = ranks * _positive(info, "max_total_num_tokens", _CACHE_TOKENS) // BLOCK_TOKENS
        limit = int(self._margin * batch) if self._margin > 0 else None
        return EngineTraits(measure, limit, blocks)

    async def _ask_largest_forward(self, engine: RoutedEngine) -> int | None:
        """Return how many tokens an engine's largest forward has, if it has the plugin."""
        try:
            answer = await self._http.get(f"{engine.url}/flashmoa/info", timeout=_PROBE_SECONDS)
        except httpx.HTTPError:
            return None
        return _positive(parse_object(answer.content), "largest_forward", 0) or None

    def _choose_measure(self, info: Mapping[str, Any]) -> Measure:
        try:
            config = self._config
            if config is None:
                path = Path(str(info.get("model_path", ""))) / "config.json"
                config = json.loads(path.read_text())
            return true_flops(config or {})
        except (OSError, ValueError) as error:  # UnknownShape is a ValueError.
            unread = f"{error}; give the model's config.json with --model-config"
            reason = error if isinstance(error, UnknownShape) else unread
            logger.info("Work is counted in tokens: %s", reason)
            return TokenCount()


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default


@dataclass(slots=True)
class _FollowedRequest:
    placement: Placement
    # When the last snapshot was made, and how many distinct ones came after the first.
    last_snapshot: float | None = None
    later_snapshots: int = 0

    def note_snapshot(self, made: float) -> bool:
        """Count a snapshot. Return whether it certainly includes this request."""
        self.later_snapshots += self.last_snapshot is not None and made > self.last_snapshot
        self.last_snapshot = made
        return self.later_snapshots >= _LATER_SNAPSHOTS


class PrefillPoller:
    """Asks one engine whether it has computed the prompts of requests without streaming.

    The answer to such a request arrives only when all of it is decoded. That may take minutes, in
    which the engine has room for other prompts. SGLang reports how many requests still wait
    (``GET /v1/loads``), in snapshots that it makes between its forwards, and it begins requests
    roughly in order.
    """

    def __init__(self, http: httpx.AsyncClient, engine: str) -> None:
        self._http = http
        self._url = f"{engine}/v1/loads?include=core"
        # The keys are request names, in the order in which the requests were sent.
        self._followed: dict[str, _FollowedRequest] = {}
        self._added = anyio.Event()

    @contextmanager
    def follow(self, placement: Placement) -> Generator[None]:
        """Report to the placement when its prompt is computed, until the context is left."""
        self._followed[placement.request] = _FollowedRequest(placement)
        self._added.set()
        try:
            yield
        finally:
            self._followed.pop(placement.request, None)

    async def run(self) -> None:
        """Poll the engine while there are requests to follow, until cancelled."""
        while True:
            self._added = anyio.Event()
            if not self._followed:
                await self._added.wait()
            await anyio.sleep(_POLL_SECONDS)
            if self._followed and not await self._poll():
                await anyio.sleep(_FAILED_POLL_SECONDS)

    async def _poll(self) -> bool:
        try:
            answer = await self._http.get(self._url)
            loads: list[dict[str, Any]] = answer.raise_for_status().json()["loads"]
            waiting = sum(int(load["num_waiting_reqs"]) for load in loads)
            made = max(float(load["timestamp"]) for load in loads)
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False
        self.apply_snapshot(waiting, made)
        return True

    def apply_snapshot(self, waiting: int, made: float) -> None:
        """Report the prompts that a snapshot shows to be computed.

        Args:
            waiting: number of requests whose prefill has not begun.
            made: when the snapshot was made, in seconds by the engine's clock.
        """
        included = [request for request in self._followed.values() if request.note_snapshot(made)]
        for request in included[: max(0, len(included) - waiting)]:
            del self._followed[request.placement.request]
            request.placement.finish_prefill()
