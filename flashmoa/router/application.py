"""Serve several engines at one address (`application`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flashmoa._limits import Recent
from flashmoa.engine.wire import STREAM_HEADER
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import EnginePool, RoutedEngine, RouterOptions
from flashmoa.router.forwarding import (
    CHAT,
    STREAMS,
    AnswerObserver,
    EngineLost,
    ForwardedRequest,
    Handler,
    make_application,
    make_error_response,
    make_route,
    open_connections,
    parse_object,
)
from flashmoa.router.hearing import CALLS, HeardChannels
from flashmoa.router.policy import PrefixAware
from flashmoa.router.prompts import find_blocks

# The policy chooses the engine for these requests, because they have a prompt.
POLICY_ROUTES = (
    *(CHAT, "/generate", STREAMS, "/prefill_only", "/v1/completions", "/v1/embeddings"),
    *("/v1/classify", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
# Any engine of the router can answer these requests; /flashmoa/similarities if all embed.
_TEXT_ROUTES = (
    *("/render", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    "/flashmoa/similarities",
)
_INFO_ROUTES = ("/v1/models", "/model_info", "/get_model_info", "/server_info")
# The capability of engines that add the text of their calls to prompt streams.
_FOLLOWS = "follow"
_MAX_STREAMS = 100_000


def application(options: RouterOptions) -> Starlette:
    """Return a server of OpenAI's and SGLang's routes, prompt streams and ``/metrics``."""
    router = _Router(options)

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return make_route(path, handler, options.max_body_bytes, *methods)

    stream = f"{STREAMS}/{{id}}"
    routes = [
        *(route(path, router.send_by_policy, "POST") for path in POLICY_ROUTES),
        *(route(path, router.send_to_any, "POST") for path in _TEXT_ROUTES),
        *(route(path, router.send_to_any, "GET") for path in _INFO_ROUTES),
        route("/flashmoa/info", router.info, "GET"),
        route(CALLS, router.hear, "GET"),
        route(stream, router.send_to_stream, "GET", "DELETE"),
        route(f"{stream}/append", router.send_to_stream, "POST"),
        route(f"{stream}/keep_alive", router.send_to_stream, "POST"),
        # These need no API key, as SGLang's do not.
        Route("/health", router.health),
        Route("/metrics", router.metrics),
    ]
    return make_application(routes, router.lifespan)


class _Router:
    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self._dispatcher = Dispatcher(options.policy or PrefixAware())
        self._streams = Recent[str, RoutedEngine](_MAX_STREAMS)  # By the streams' ids.

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with open_connections() as self._connections:
            self._channels = app.state.channels = HeardChannels(self._connections)
            self._pool = EnginePool(self._connections, self._dispatcher, self._options)
            async with self._pool.running():
                yield

    async def send_by_policy(self, call: ForwardedRequest) -> Response:
        """Send a request with a prompt to the engine of its prompt stream, if there is one.

        Otherwise, or if that engine has left, the policy chooses the engine. A prompt stream is
        only a hint, because the request contains its whole prompt.
        """
        body = parse_object(call.body)
        # KV events contain token ids. Engines tell a prompt's tokens too, but that takes
        # milliseconds, so they are asked only if KV events are followed.
        has_events = any(one.events for one in self._pool.engines.values())
        stream = body.get("prompt_stream_id") or call.headers.get(STREAM_HEADER.lower())
        answer, engine = None, self._streams.get(str(stream))
        if engine is not None and engine.is_up:
            blocks = await find_blocks(body, self._connections, None, call.api_key)
            answer = await self._try(call, engine)
            if answer is not None and answer.status_code == 200 and not has_events:
                self._dispatcher.policy.add_blocks(engine.url, blocks.hashes)
                self._dispatcher.reconsider()
        while answer is None:
            engine = self._pool.next_engine()
            asked = engine.url if has_events else None
            blocks = await find_blocks(body, self._connections, asked, call.api_key)
            async with AsyncExitStack() as stack:
                placement = await stack.enter_async_context(self._dispatcher.place(blocks))
                engine = self._pool.engines[placement.engine]
                answer = await self._try(call, engine, placement, stack.pop_all())
        opened = parse_object(answer.body).get("id") if call.path == STREAMS else None
        if isinstance(opened, str) and engine is not None:
            self._streams[opened] = engine
        return answer

    async def send_to_any(self, call: ForwardedRequest) -> Response:
        answer = await self._try(call, self._pool.next_engine())
        return answer or await self.send_to_any(call)

    async def info(self, call: ForwardedRequest) -> Response:
        """Answer as an engine that follows no calls: a stream may be on another engine."""
        answer = await self.send_to_any(call)
        told = parse_object(answer.body)
        capabilities: list[str] = told.get("capabilities") or []
        if _FOLLOWS in capabilities:
            others = [one for one in capabilities if one != _FOLLOWS]
            return JSONResponse({**told, "capabilities": others})
        return answer

    async def send_to_stream(self, call: ForwardedRequest) -> Response:
        """Send a request about a prompt stream to its engine, which checks the client's key."""
        stream = call.path.split("/")[2]
        engine = self._streams.get(stream)
        answer = await self._try(call, engine) if engine and engine.is_up else None
        if answer is None:
            message = f"no engine has a prompt stream {stream!r}; open a new one"
            return make_error_response(404, message, "unknown_stream")
        if call.method == "DELETE" and answer.status_code == 200:
            self._streams.pop(stream, None)
        return answer

    async def hear(self, call: ForwardedRequest) -> Response:
        """Open a channel, once an engine has accepted the client's key."""
        checked = await self.send_to_any(replace(call, target="/model_info", headers=call.api_key))
        return checked if checked.status_code in (401, 403) else self._channels.open(call)

    async def _try(
        self,
        call: ForwardedRequest,
        engine: RoutedEngine,
        observer: AnswerObserver | None = None,
        stack: AsyncExitStack | None = None,
    ) -> Response | None:
        """Return an engine's answer, or ``None`` if the engine has left without taking the request.

        Raises: EngineLost if the engine does not answer and may have received the request. Another
            engine does not get the request: it could crash all engines.
        """
        try:
            async with stack or AsyncExitStack() as stack:
                stack.enter_context(self._channels.calling(call.headers, engine.url))
                answer = await self._connections.forward(
                    call, engine.url, observer, stack.pop_all()
                )
        except EngineLost as lost:
            await self._pool.recheck(engine)
            if lost.reached or engine.is_up:
                raise
            return None
        # An engine that shuts down may refuse a request before the router notices it.
        if answer.status_code == 503:
            await self._pool.recheck(engine)
            return answer if engine.is_up else None
        return answer

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._dispatcher.policy.engines else 503)

    async def metrics(self, _request: Request) -> Response:
        registry = CollectorRegistry()

        def gauge(name: str, about: str, values: Mapping[str, float]) -> None:
            by_engine = Gauge(f"flashmoa_router_{name}", about, ["engine"], registry=registry)
            for url, value in values.items():
                by_engine.labels(url).set(value)

        waiting = Gauge("flashmoa_router_waiting", "Requests without an engine", registry=registry)
        waiting.set(self._dispatcher.waiting)
        known, engines = self._dispatcher.policy.engines.items(), self._pool.engines.items()
        gauge("engine_up", "Whether it gets requests", {url: one.is_up for url, one in engines})
        gauge("engine_load", "Prefill work left", {url: one.load.total for url, one in known})
        full = {url: one.traits.full.work for url, one in known if one.traits.full}
        gauge("engine_threshold", "Prefill work with which it is full", full)
        gauge("engine_blocks", "Blocks in its cache", {url: len(one.blocks) for url, one in known})
        page = generate_latest(self._connections.counted) + generate_latest(registry)
        return Response(page, media_type="text/plain; version=0.0.4")
