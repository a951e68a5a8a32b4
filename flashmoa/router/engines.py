"""Watch engines and their data-parallel ranks, and ask all of them (`EnginePool`)."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.responses import Response

from flashmoa.router.cache_tables import BLOCK_TOKENS, SATURATION_MARGIN, EngineTraits
from flashmoa.router.client_requests import STREAMS, parse_object
from flashmoa.router.dispatcher import MAX_WAITING, Dispatcher
from flashmoa.router.errors import AllEnginesRefused, EngineLost, NoEngine
from flashmoa.router.flops import TOKENS, Measure, true_flops
from flashmoa.router.forwarding import Connections
from flashmoa.router.kv_events import EventSource, parse_event_sources
from flashmoa.router.policy import PrefixAware

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# The tokens of a forward and of a cache, if an engine does not report them.
_BATCH_TOKENS, _CACHE_TOKENS = 8192, 1 << 20
# An engine's URL has no fragment, so this separates it from the number of a rank.
_RANK_MARK = "#"
_MAX_REMEMBERED_STREAMS = 100_000
# The status of a stream that the engine had and no longer has.
_GONE = 410
# How long a request waits to learn which engine has its prompt stream. It runs without, too.
_LOOKUP_SECONDS = 5.0


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
        max_waiting: the most requests in the queue.
        watch_seconds: time between two probes of an engine.
    """

    engines: Sequence[str]
    policy: PrefixAware | None = None
    api_key: str | None = None
    model_config: Mapping[str, Any] | None = None
    saturation_margin: float = SATURATION_MARGIN
    max_body_bytes: int = 32 << 20
    max_waiting: int = MAX_WAITING
    watch_seconds: float = 2.0


@dataclass(slots=True)
class RoutedEngine:
    """Holds the router's state of one engine.

    Attributes:
        is_up: whether requests are sent to it.
        ranks: the number of data-parallel ranks among which the router chooses; 1 if the engine
            chooses itself, or has one.
        events: the publishers of its KV events, one for each place.
        checked: when the last probe after a broken connection began.
    """

    url: str
    is_up: bool = False
    ranks: int = 1
    events: tuple[EventSource, ...] = ()
    checked: float = -math.inf
    # Held while it joins, so that its ranks do not change meanwhile, and while it is checked.
    lock: anyio.Lock = field(default_factory=anyio.Lock)

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


class EnginePool:
    """Probes engines; those that are ready join the dispatcher, and the others leave it.

    The work of all engines is counted in one measure, that of the first one that joins, since loads
    in FLOPs and in tokens cannot be compared. Once no engine is left, the next one decides.

    It remembers which engine has a prompt stream, and asks every engine for a stream that it does
    not remember, for example after a restart.

    Args:
        on_join: called with each engine that has joined, also when it joins again.
    """

    def __init__(
        self,
        connections: Connections,
        dispatcher: Dispatcher,
        options: RouterOptions,
        on_join: Callable[[RoutedEngine], None] = lambda _: None,
    ) -> None:
        self.engines = {url: RoutedEngine(url) for url in options.engines}
        self._connections = connections
        self._dispatcher = dispatcher
        self._options = options
        self._on_join = on_join
        key = options.api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._measure = TOKENS
        self._stream_places: OrderedDict[str, str] = OrderedDict()
        self._turn = itertools.count()

    async def watch(self, engine: RoutedEngine) -> None:
        """Probe an engine again and again; call :meth:`probe` before."""
        if not engine.is_up:
            logger.warning("%s is not ready; it gets no requests until it is", engine.url)
        while True:
            await anyio.sleep(self._options.watch_seconds)
            await self.probe(engine)

    async def probe(self, engine: RoutedEngine) -> None:
        """Ask once whether an engine answers, and let it join or leave.

        A silent engine stays as it is: it may be busy. Whether it hangs, others find out.
        """
        answers = await self._answers(engine)
        if answers and not engine.is_up:
            async with engine.lock:
                # Another probe may have let it join.
                traits = None if engine.is_up else await self._ask_traits(engine)
                if traits is not None:
                    self._let_in(engine, traits)
        elif answers is False and engine.is_up:
            self._leave(engine)

    async def recheck(self, engine: RoutedEngine) -> None:
        """Let an engine leave whose connection has broken, unless it answers a probe.

        Requests whose connections broke before a probe began share its result.
        """
        broken = anyio.current_time()
        if not engine.is_up:
            return
        async with engine.lock:
            if engine.is_up and engine.checked < broken:
                engine.checked = anyio.current_time()
                if not await self._answers(engine) and engine.is_up:
                    self._leave(engine)

    def _let_in(self, engine: RoutedEngine, traits: EngineTraits) -> None:
        self._measure = traits.measure
        engine.is_up = True
        for place in engine.places:
            self._dispatcher.join(place, traits)
        self._on_join(engine)
        logger.info("%s answers; its work is counted in %s", engine.url, traits.measure.unit)
        if not engine.events:
            text = (
                "No KV events of %s are followed, so an answer without streaming counts as work "
                "until it is complete; start the engine with --kv-events-config if such answers "
                "are long"
            )
            logger.warning(text, engine.url)

    def _leave(self, engine: RoutedEngine) -> None:
        """Forget an engine's cache and load. It may still finish answers that it has begun."""
        engine.is_up = False
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
            answer = await self._ask(engine, "/health/ready")
        except EngineLost as error:
            # An engine that was not reached has ended, or its host has.
            return None if error.reached else False
        return None if answer is None else answer.status_code < 500

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
            return None  # Its ranks, or its forwards and its cache, are not known yet.
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
        # The settings are those of one data-parallel rank.
        unnamed_ranks = self._divide(engine, settings, plugin)
        forward = _positive(settings, "chunked_prefill_size", _BATCH_TOKENS)
        batch = unnamed_ranks * _positive(plugin, "largest_forward", forward)
        tokens = unnamed_ranks * _positive(settings, "max_total_num_tokens", _CACHE_TOKENS)
        margin = self._options.saturation_margin
        measure = await self._choose_measure(settings)
        if self._dispatcher.engines:
            measure = self._measure
        return EngineTraits(
            measure, int(margin * batch) if margin > 0 else None, tokens // BLOCK_TOKENS
        )

    def _divide(
        self, engine: RoutedEngine, settings: Mapping[str, Any], plugin: Mapping[str, Any]
    ) -> int:
        """Make each data-parallel rank a place if requests can name it.

        Args: plugin: the engine's ``/flashmoa/info``; a plugin that tells its ranks lets every
            request name one.

        Return the number of ranks at each place.
        """
        try:
            engine.events = parse_event_sources(engine.url, settings)
        except ValueError as error:
            logger.warning("KV events of %s are not followed: %s", engine.url, error)
            engine.events = ()
        told = _positive(plugin, "data_parallel_ranks", 0)
        ranks = told or _positive(settings, "dp_size", 1)
        # Without events by rank it would be unknown which rank has a block.
        can_name = told > 0 and len(engine.events) in (0, ranks)
        engine.ranks = ranks if can_name else 1
        if engine.ranks < ranks:
            engine.events = ()
            text = (
                "%s chooses itself among its %d data-parallel ranks, so prompts may be computed on "
                "several of them, and their KV events are not followed; requests name the rank on "
                "engines with this version's plugin"
            )
            logger.warning(text, engine.url, ranks)
        return ranks // engine.ranks

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

    def _urls_up(self) -> list[str]:
        return [url for url, engine in self.engines.items() if engine.is_up]

    def next_engine(self) -> str:
        """Return the URL of an engine, each in turn. Raises: NoEngine if none is up."""
        if not (urls := self._urls_up()):
            raise NoEngine
        return urls[next(self._turn) % len(urls)]

    def remember_stream(self, stream: object, place: str) -> None:
        """Remember the place of a prompt stream; ignore a ``stream`` that is not a string."""
        if isinstance(stream, str):
            self._stream_places[stream] = place
        while len(self._stream_places) > _MAX_REMEMBERED_STREAMS:
            self._stream_places.popitem(last=False)

    def forget_stream(self, stream: str) -> None:
        self._stream_places.pop(stream, None)

    async def place_of_stream(self, stream: str, headers: Mapping[str, str]) -> str | None:
        """Return the place of a prompt stream, or ``None`` if no engine has it.

        It is the engine's URL if the router does not know the stream's rank.

        Args:
            headers: the client's API key.

        Raises:
            NoEngine: if no engine answers.
            AllEnginesRefused: if every engine refuses the API key.
        """
        if (place := self._stream_places.get(stream)) is not None:
            engine = self.engines[split_place(place)[0]]
            # After a restart it may have fewer data-parallel ranks.
            if engine.is_up and place in engine.places:
                return place
            self.forget_stream(stream)
        if not (stream.isascii() and stream.isalnum()):
            return None
        replies = await self.ask_all(
            "GET",
            f"{STREAMS}/{stream}",
            headers,
            seconds=_LOOKUP_SECONDS,
            enough=lambda reply: reply.status_code in (200, _GONE),
        )
        for engine, reply in replies.items():
            if reply.status_code in (200, _GONE):
                self.remember_stream(stream, engine)
                return engine
        refusals = [reply for reply in replies.values() if reply.status_code in (401, 403)]
        if len(refusals) == len(replies):
            raise AllEnginesRefused(refusals[0])
        return None

    async def ask_all(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        seconds: float = 60.0,
        enough: Callable[[Response], bool] = lambda _: False,
    ) -> dict[str, Response]:
        """Send a request to all engines that are up. Return the replies by engine.

        Args:
            seconds: how long to wait for each.
            enough: returns whether a reply is all that is wanted, so that no other is waited for.

        Raises: NoEngine if no engine replies.
        """
        replies: dict[str, Response] = {}

        async def ask(engine: str) -> None:
            try:
                url = engine + target
                reply = await self._connections.ask(method, url, headers, seconds=seconds)
            except EngineLost:
                return
            if reply is not None:
                replies[engine] = reply
                if enough(reply):
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for engine in self._urls_up():
                group.start_soon(ask, engine)
        if not replies:
            raise NoEngine
        return replies


def _positive(info: Mapping[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and value > 0 else default


def merge_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge engines' ``/flashmoa/info`` into that of one engine with the abilities they share.

    Args: infos: an engine without the plugin has an empty one, and no abilities.
    """
    capabilities = set(infos[0].get("capabilities", []))
    capabilities.intersection_update(*(info.get("capabilities", []) for info in infos))
    limits = {
        name: min(info[name] for info in infos if info.get(name) is not None)
        for name in ("context_length", "max_prompt_tokens")
        if any(info.get(name) is not None for info in infos)
    }
    return {
        **max(infos, key=len),
        **limits,
        "data_parallel_ranks": 1,  # The router chooses among them itself.
        "capabilities": sorted(capabilities),
        "prompt_streams": sum(info.get("prompt_streams", 0) for info in infos),
        "kv": [rank for info in infos for rank in info.get("kv", [])],
    }
