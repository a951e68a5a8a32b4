"""The engines behind the router: which are there, and what they are."""

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
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.event_sources import EventSource, event_sources
from flashmoa.router.flops import Measure, TokenCount, saturation
from flashmoa.router.policies import EngineTraits
from flashmoa.router.shape import UnknownShape, true_flops

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# Between two looks at one that drops its connections.
_DROPPED_SECONDS = 0.05
# Looks at one that answers and does not say what it is, until it is taken without that.
_UNTOLD = 6
# Of a forward and of a cache, where an engine does not say.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20


@dataclass(slots=True)
class Engine:
    """One engine as the router sees it.

    Attributes:
        is_up: whether requests are sent to it.
        unit: what its work is measured in.
        events: where it publishes KV events, by data-parallel rank.
    """

    url: str
    is_up: bool = False
    unit: str = ""
    saturation: int | None = None
    events: tuple[EventSource, ...] = ()
    # Set once its events are known.
    known: anyio.Event = field(default_factory=anyio.Event)
    # When it last answered, by the event loop's clock.
    heard: float = 0.0
    # How often in a row it was too busy to say what it is.
    untold: int = 0
    _attended: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])

    @contextmanager
    def attended(self) -> Generator[anyio.CancelScope]:
        """Cancelled where the engine hangs, so that nobody waits for it any longer."""
        with anyio.CancelScope() as scope:
            self._attended.add(scope)
            try:
                yield scope
            finally:
                self._attended.discard(scope)

    def give_up(self) -> None:
        """Cancel what is waited for."""
        for scope in self._attended:
            scope.cancel()


class Watch:
    """Looks after engines: those that answer join the dispatcher, others leave it.

    Args:
        config: the model's, where its engines' own path cannot be read here.
        saturation_margin: kappa; 0: engines take everything.
        every: seconds between two looks at an engine.
        hung_seconds: how long one that accepts connections may leave them unanswered.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        dispatcher: Dispatcher,
        *,
        config: Mapping[str, Any] | None = None,
        saturation_margin: float = 1.2,
        every: float = 2.0,
        hung_seconds: float = 40.0,
    ) -> None:
        self._http = http
        self._dispatcher = dispatcher
        self._config = config
        self._margin = saturation_margin
        self._every = every
        self._hung_seconds = hung_seconds

    async def run(self, engine: Engine) -> None:
        """Until cancelled."""
        while True:
            await self.look(engine)
            await anyio.sleep(self._every)

    async def look(self, engine: Engine) -> None:
        """Ask once whether it is there."""
        await self._judge(engine, await self._answers(engine))

    async def doubt(self, engine: Engine) -> None:
        """Ask until it is certain whether it is there: its connection has broken."""
        answers = None
        with anyio.move_on_after(min(_PROBE_SECONDS, self._hung_seconds)):
            # One that ends may still accept connections, and drop them.
            while (answers := await self._answers(engine)) is None:  # noqa: ASYNC110
                await anyio.sleep(_DROPPED_SECONDS)
        await self._judge(engine, answers)

    async def _judge(self, engine: Engine, answers: bool | None) -> None:
        if answers and not engine.is_up:
            await self._join(engine)
        elif answers is False and engine.is_up:
            self._leave(engine)
        elif answers is None and engine.is_up and self._hangs(engine):
            self._leave(engine)
            engine.give_up()

    def _hangs(self, engine: Engine) -> bool:
        """A busy engine is slow, or closes a connection that was kept; up to a point."""
        return anyio.current_time() - engine.heard >= self._hung_seconds

    async def _join(self, engine: Engine) -> None:
        traits = await self._traits(engine)
        if traits is None or engine.is_up:
            return  # It is asked again; or it was looked at twice.
        engine.unit, engine.saturation = traits.measure.unit, traits.saturation
        engine.is_up = True
        engine.known.set()
        self._dispatcher.join(engine.url, traits)
        logger.info("%s is there; its work is counted in %s", engine.url, engine.unit)

    def _leave(self, engine: Engine) -> None:
        """Nothing of it is known any more. What it has begun to answer it may still end."""
        engine.is_up = False
        self._dispatcher.leave(engine.url)
        logger.warning("%s does not answer; it gets no requests until it does", engine.url)

    async def _answers(self, engine: Engine) -> bool | None:
        """Whether it does; ``None`` if not in time."""
        # Not /health, which SGLang answers with a generation.
        try:
            seconds = min(_PROBE_SECONDS, self._hung_seconds)
            answer = await self._http.get(f"{engine.url}/model_info", timeout=seconds)
        except httpx.ConnectError:
            return False  # One that is gone refuses.
        except httpx.RequestError:
            return None
        engine.heard = anyio.current_time()
        return answer.status_code < 500

    async def _traits(self, engine: Engine) -> EngineTraits | None:
        if (told := await self._told(engine)) is None:
            return None
        measure = self._measure(told)
        engine.events = event_sources(engine.url, told)
        # It speaks of one data-parallel rank.
        ranks = _number(told, "dp_size", 1)
        batch = ranks * _number(told, "chunked_prefill_size", _BATCH_TOKENS)
        held = ranks * _number(told, "max_total_num_tokens", _CACHE_TOKENS) // BLOCK_TOKENS
        limit = saturation(measure, batch, margin=self._margin) if self._margin > 0 else None
        return EngineTraits(measure, limit, held)

    async def _told(self, engine: Engine) -> dict[str, Any] | None:
        """What the engine says of its settings, if it does; ``None``: it is too busy to say."""
        try:
            answer = await self._http.get(f"{engine.url}/server_info", timeout=_PROBE_SECONDS)
            told: Any = answer.json() if answer.is_success else {}
        except httpx.HTTPError:
            engine.untold += 1
            return None if engine.untold < _UNTOLD else {}
        except ValueError:
            return {}
        engine.untold = 0
        if answer.status_code in (401, 403):
            logger.warning("%s says nothing of itself: give the router --api-key", engine.url)
        return cast("dict[str, Any]", told) if isinstance(told, dict) else {}

    def _measure(self, told: Mapping[str, Any]) -> Measure:
        try:
            config = self._config
            if config is None:
                path = Path(str(told.get("model_path", ""))) / "config.json"
                config = json.loads(path.read_text())
            return true_flops(config or {})
        except (OSError, ValueError) as error:  # UnknownShape among them.
            reason = error if isinstance(error, UnknownShape) else "its config is not here"
            logger.info("Work is counted in tokens: %s", reason)
            return TokenCount()


def _number(told: Mapping[str, Any], name: str, otherwise: int) -> int:
    """A positive one, if it is told."""
    value = told.get(name)
    return value if isinstance(value, int) and value > 0 else otherwise
