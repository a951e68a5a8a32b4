"""The engines behind the router: which of them answer, what they are, and how far they are."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import httpx

from flashmoa.router.blocks import BLOCK_TOKENS
from flashmoa.router.dispatcher import Dispatcher, Placement
from flashmoa.router.flops import Measure, TokenCount, UnknownShape, saturation, true_flops
from flashmoa.router.kv_events import EventSource, event_sources
from flashmoa.router.policies import EngineTraits

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# Between two probes of an engine that drops its connections.
_DROPPED_SECONDS = 0.05
# After this many unanswered questions about its settings, an engine is taken without them.
_MAX_SILENT = 6
# The tokens of a forward and of a cache, where an engine does not say.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20
# Between two questions about waiting requests; the second where an engine does not answer them.
_POLL_SECONDS, _UNANSWERED_POLL_SECONDS = 0.25, 5.0
# The first snapshot after a request may be of a forward that was under way when it came.
_SNAPSHOTS = 2


@dataclass(slots=True)
class RoutedEngine:
    """One engine as the router sees it.

    Attributes:
        is_up: whether requests are sent to it.
        unit: the unit of its work.
        events: where it publishes KV events, by data-parallel rank.
        described: is set once ``events`` is known.
        last_answer: when it last answered, by the event loop's clock.
        silences: how often in a row it was too busy to tell its settings.
    """

    url: str
    is_up: bool = False
    unit: str = ""
    saturation: int | None = None
    events: tuple[EventSource, ...] = ()
    described: anyio.Event = field(default_factory=anyio.Event)
    last_answer: float = 0.0
    silences: int = 0
    _waiting: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])

    @contextmanager
    def until_hung(self) -> Generator[anyio.CancelScope]:
        """Cancel the context's body if the engine hangs."""
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield scope
            finally:
                self._waiting.discard(scope)

    def cancel_waiting(self) -> None:
        """Cancel everything that waits for this engine."""
        for scope in self._waiting:
            scope.cancel()


class EngineMonitor:
    """Probes engines: those that answer join the dispatcher, the others leave it.

    Args:
        config: the model's, where the path that its engines name cannot be read here.
        saturation_margin: kappa; with 0 engines take every request.
        interval: seconds between two probes of an engine.
        hung_seconds: how long an engine that accepts connections may leave them unanswered.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        dispatcher: Dispatcher,
        *,
        config: Mapping[str, Any] | None = None,
        saturation_margin: float = 1.2,
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
        """Ask once whether an engine answers, and act on it."""
        await self._apply(engine, await self._answers(engine))

    async def recheck(self, engine: RoutedEngine) -> None:
        """Ask until it is certain whether an engine answers, because its connection has broken."""
        answers = None
        with anyio.move_on_after(min(_PROBE_SECONDS, self._hung_seconds)):
            # An engine that ends may still accept connections, and drop them.
            while (answers := await self._answers(engine)) is None:  # noqa: ASYNC110
                await anyio.sleep(_DROPPED_SECONDS)
        await self._apply(engine, answers)

    async def _apply(self, engine: RoutedEngine, answers: bool | None) -> None:
        """Have an engine join or leave. ``answers``: ``None`` where it gave none in time."""
        if answers and not engine.is_up:
            await self._join(engine)
        elif answers is False and engine.is_up:
            self._leave(engine)
        elif answers is None and engine.is_up and self._hangs(engine):
            self._leave(engine)
            engine.cancel_waiting()

    def _hangs(self, engine: RoutedEngine) -> bool:
        # A busy engine is slow, or closes a connection that was kept, but only for so long.
        return anyio.current_time() - engine.last_answer >= self._hung_seconds

    async def _join(self, engine: RoutedEngine) -> None:
        traits = await self._traits(engine)
        if traits is None or engine.is_up:
            return  # It is asked again later, or another probe had it join meanwhile.
        engine.unit, engine.saturation = traits.measure.unit, traits.saturation
        engine.is_up = True
        engine.described.set()
        self._dispatcher.join(engine.url, traits)
        logger.info("%s answers; its work is counted in %s", engine.url, engine.unit)

    def _leave(self, engine: RoutedEngine) -> None:
        """Forget what is known of an engine, which may still finish answers that it has begun."""
        engine.is_up = False
        self._dispatcher.leave(engine.url)
        logger.warning("%s does not answer; it gets no requests until it does", engine.url)

    async def _answers(self, engine: RoutedEngine) -> bool | None:
        """Return whether an engine answers; ``None`` if it does not in time."""
        # SGLang would answer /health with a generation.
        try:
            seconds = min(_PROBE_SECONDS, self._hung_seconds)
            answer = await self._http.get(f"{engine.url}/model_info", timeout=seconds)
        except httpx.ConnectError:
            return False  # Connections to an engine that is gone are refused.
        except httpx.RequestError:
            return None
        engine.last_answer = anyio.current_time()
        return answer.status_code < 500

    async def _traits(self, engine: RoutedEngine) -> EngineTraits | None:
        if (info := await self._server_info(engine)) is None:
            return None
        measure = self._measure(info)
        engine.events = event_sources(engine.url, info)
        # The settings are those of one data-parallel rank.
        ranks = _positive(info, "dp_size", 1)
        batch = ranks * _positive(info, "chunked_prefill_size", _BATCH_TOKENS)
        held = ranks * _positive(info, "max_total_num_tokens", _CACHE_TOKENS) // BLOCK_TOKENS
        limit = saturation(measure, batch, margin=self._margin) if self._margin > 0 else None
        return EngineTraits(measure, limit, held)

    async def _server_info(self, engine: RoutedEngine) -> dict[str, Any] | None:
        """Return the settings that an engine tells; ``None`` if it is too busy to answer."""
        try:
            answer = await self._http.get(f"{engine.url}/server_info", timeout=_PROBE_SECONDS)
            info: Any = answer.json() if answer.is_success else {}
        except httpx.HTTPError:
            engine.silences += 1
            return None if engine.silences < _MAX_SILENT else {}
        except ValueError:
            return {}
        engine.silences = 0
        if answer.status_code in (401, 403):
            logger.warning("%s hides its settings; start the router with --api-key", engine.url)
        return cast("dict[str, Any]", info) if isinstance(info, dict) else {}

    def _measure(self, info: Mapping[str, Any]) -> Measure:
        try:
            config = self._config
            if config is None:
                path = Path(str(info.get("model_path", ""))) / "config.json"
                config = json.loads(path.read_text())
            return true_flops(config or {})
        except (OSError, ValueError) as error:  # UnknownShape is a ValueError.
            reason = error if isinstance(error, UnknownShape) else "its config cannot be read here"
            logger.info("Work is counted in tokens: %s", reason)
            return TokenCount()


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default


@dataclass(slots=True)
class _Unfinished:
    placement: Placement
    # When the last snapshot was made, by the engine's clock, and how many came after the first.
    made: float | None = None
    later: int = 0

    def covered_by(self, made: float) -> bool:
        """Note a snapshot; return whether it certainly includes this request."""
        self.later += self.made is not None and made > self.made
        self.made = made
        return self.later >= _SNAPSHOTS


class PrefillPoller:
    """Asks one engine whether the prompts of answers that are not streamed are computed.

    Nothing is heard of such a request until it is over. An engine that decodes it for minutes has
    long computed its prompt, and has room for others. SGLang tells how many requests still wait
    (``GET /v1/loads``), in snapshots that it makes as it goes, and takes requests roughly in order.
    """

    def __init__(self, http: httpx.AsyncClient, engine: str) -> None:
        self._http = http
        self._url = f"{engine}/v1/loads?include=core"
        # By request, in the order in which they were sent.
        self._unfinished: dict[str, _Unfinished] = {}
        self._added = anyio.Event()

    @contextmanager
    def follow(self, placement: Placement) -> Generator[None]:
        """Tell the placement once its prompt is computed, until the context is left."""
        self._unfinished[placement.request] = _Unfinished(placement)
        self._added.set()
        try:
            yield
        finally:
            self._unfinished.pop(placement.request, None)

    async def run(self) -> None:
        """Poll the engine while there are requests to follow, until cancelled."""
        while True:
            self._added = anyio.Event()
            if not self._unfinished:
                await self._added.wait()
            await anyio.sleep(_POLL_SECONDS)
            if self._unfinished and not await self._poll():
                await anyio.sleep(_UNANSWERED_POLL_SECONDS)

    async def _poll(self) -> bool:
        try:
            answer = await self._http.get(self._url)
            loads: list[dict[str, Any]] = answer.raise_for_status().json()["loads"]
            waiting = sum(int(one["num_waiting_reqs"]) for one in loads)
            made = max(float(one["timestamp"]) for one in loads)
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False
        self.apply_snapshot(waiting, made)
        return True

    def apply_snapshot(self, waiting: int, made: float) -> None:
        """Tell placements what a snapshot shows.

        Args:
            waiting: requests whose prompt is not begun.
            made: when the snapshot was made, in seconds by the engine's clock.
        """
        covered = [one for one in self._unfinished.values() if one.covered_by(made)]
        for one in covered[: max(0, len(covered) - waiting)]:
            del self._unfinished[one.placement.request]
            one.placement.computed()
